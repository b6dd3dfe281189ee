"""Python clients of `tiered-index serve`: one for threads, one for asyncio."""

from tiered_index.client.client import AsyncIndexClient, IndexClient

__all__ = ["AsyncIndexClient", "IndexClient"]
