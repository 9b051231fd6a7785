"""A page that shows runs, and the same for programs: REST, server-sent events, WebSocket. Needs paramserver[web]."""
