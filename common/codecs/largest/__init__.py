"""Codecs that send a few values and their places."""
