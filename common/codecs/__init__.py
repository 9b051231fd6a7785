"""How the parameters' part of a contribution is encoded: one file a codec, found by name."""
