"""Output of the metrics: tables, pictures, files."""
