"""Tasks that test a run. They are found by name like the built-in tasks (`common/registry.py`)."""
