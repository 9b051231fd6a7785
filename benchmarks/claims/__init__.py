"""Tests claims of papers about learning, a module each."""
