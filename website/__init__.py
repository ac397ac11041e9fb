"""What the documentation site is built with; ``mkdocs.yml`` names these modules."""
