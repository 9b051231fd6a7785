"""What server, worker and launcher share: errors, configuration, wire framing, codecs, tensor layout."""
