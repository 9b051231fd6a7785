"""The server: policies decide, the store computes, the service translates."""
