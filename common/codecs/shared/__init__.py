"""Code that several codecs share."""
