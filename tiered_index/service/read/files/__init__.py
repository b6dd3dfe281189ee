"""Index files as lookups search them."""
