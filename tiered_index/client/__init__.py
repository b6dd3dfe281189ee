"""Python clients of `tiered-index serve`: one for threads, one for asyncio.

docs/service.md has examples. docs/reference.md is the reference of the service, and docs/api.md lists all public names.
Raises `ConfigError` on import without httpx (extra `client`).
"""

from tiered_index.errors import ConfigError, install_hint

try:
    from tiered_index.client.client import AsyncIndexClient, IndexClient
except ModuleNotFoundError as error:
    if error.name != "httpx":
        raise
    text = f"the client of a service needs the extra 'client' (httpx is missing): {install_hint('client')}"
    raise ConfigError(text) from error

__all__ = ["AsyncIndexClient", "IndexClient"]
