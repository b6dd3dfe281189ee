"""A client of `tiered-index serve`, for programs in Python; sync and async."""

from tiered_index.client.client import AsyncIndexClient, IndexClient

__all__ = ["AsyncIndexClient", "IndexClient"]
