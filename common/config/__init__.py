"""One configuration schema for all programs, where its values come from, and the flags made of it."""
