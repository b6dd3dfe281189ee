"""The HTTP service: the library's lookups over a socket, for programs in any language. `app.py` has the routes."""
