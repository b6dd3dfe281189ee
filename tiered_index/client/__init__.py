"""Python clients of `tiered-index serve`: one for threads, one for asyncio.

docs/service.md has examples. docs/http.md is the reference of the service, and docs/api.md lists all public names.
"""

from tiered_index.client.client import AsyncIndexClient, IndexClient

__all__ = ["AsyncIndexClient", "IndexClient"]
