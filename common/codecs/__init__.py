"""Codecs, which encode the parameters of a payload. Each file is a codec, found by its name."""
