"""The paper as data: its experiments, figures and claims."""
