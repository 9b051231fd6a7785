"""Claims of papers about how well something learns, tried out; a module each, run by itself."""
