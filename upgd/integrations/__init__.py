"""A plasticity monitor inside training frameworks; each module imports its framework itself."""
