"""What a study shows: tables, figures, pages."""
