"""What an object store asks for requests and bytes. Pure; loads nothing, so that settings may hold it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from tiered_index.errors import ConfigError

__all__ = ["PriceTable"]

_READS = frozenset({"get", "get_range", "get_ranges", "get_suffix", "head"})
_FREE = frozenset({"delete", "delete_many", "abort_upload"})


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceTable:
    """US dollars a request and a byte. Defaults: Amazon S3 Standard, us-east-1, list prices as of `as_of`.

    Raises `ConfigError` for a price that is negative or not finite.
    """

    put_per_1000_usd: float = 0.005
    """PUT, COPY, POST, LIST, and each call of a multipart upload."""
    get_per_1000_usd: float = 0.0004
    """GET and HEAD."""
    delete_per_1000_usd: float = 0.0
    """DELETE and aborting an upload."""
    egress_per_gib_usd: float = 0.0
    """Bytes read; 0 within the region."""
    as_of: str = "2026-11"

    def __post_init__(self) -> None:
        for name in ("put_per_1000_usd", "get_per_1000_usd", "delete_per_1000_usd", "egress_per_gib_usd"):
            price = getattr(self, name)
            if not (math.isfinite(price) and price >= 0):
                raise ConfigError(f"{name} must be finite and not negative, not {price!r}")

    def cost_usd(self, requests: Mapping[str, int], bytes_read: int) -> float:
        """Return the price of `requests` (operation -> count) and `bytes_read`."""
        total = bytes_read / 2**30 * self.egress_per_gib_usd
        for operation, count in requests.items():
            if operation in _FREE:
                price = self.delete_per_1000_usd
            else:
                price = self.get_per_1000_usd if operation in _READS else self.put_per_1000_usd
            total += count * price / 1000
        return total
