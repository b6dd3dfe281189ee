"""For authors of storages: the tests that every storage passes. docs/embedding.md shows how to use them."""
