"""Built-in tasks, one file each, found by name (`common/registry.py`)."""
