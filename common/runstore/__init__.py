"""Every run on record: one SQLite file, its tables, how a run is written and how runs are read."""
