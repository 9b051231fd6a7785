"""What becomes of the metrics: tables, pictures, files."""
