"""Tasks that prove something about a run; found by name like the built-in ones (`common/registry.py`)."""
