"""Codecs of a scale for each block of 256 values, and a few bits for each value."""
