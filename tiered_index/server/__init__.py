"""The HTTP service: the library's lookups for programs in any language. docs/reference.md is its reference."""
