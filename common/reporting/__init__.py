"""What programs say of a run: log, history, summary, tables, files of results."""
