"""Reports of a run: log, history, summary, tables and result files."""
