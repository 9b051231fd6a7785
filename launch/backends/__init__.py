"""Where processes run: one file per backend, found by its name (`common/registry.py`)."""
