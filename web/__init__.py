"""The dashboard and its API: REST, server-sent events and WebSocket. It needs paramserver[web]."""
