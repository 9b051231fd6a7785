"""Who looks at a run: sinks of its events, and what they show."""
