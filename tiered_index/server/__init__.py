"""The HTTP service: the library's lookups for programs in any language. docs/http.md is its reference."""
