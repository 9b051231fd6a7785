"""ps-certs: certificates for servers and workers."""
