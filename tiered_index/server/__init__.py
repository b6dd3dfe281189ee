"""The HTTP service: the library's lookups for programs in any language. `app.py` has the routes."""
