"""What becomes of the figures: tables, pictures, files."""
