"""Codecs whose workers remember more than what was left out."""
