"""Prices of requests and bytes. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from tiered_index.errors import ConfigError

_READS = frozenset({"get", "get_range", "get_suffix", "head"})
_MOST_USD = 10**9


def rounded_usd(amount: float) -> float:
    """Return a sum of prices to 12 significant digits: further ones are errors of the additions."""
    return float(f"{amount:.12g}")


class PriceTable(Struct, frozen=True, kw_only=True):
    """US dollars a request and a byte. Defaults: Amazon S3 Standard, us-east-1, list prices as of `as_of`.

    Raises `ConfigError` for a price that is negative, not finite or above 10**9.

    - `put_per_1000_usd`: price of 1,000 PUT, COPY, POST and LIST requests, and requests for the parts of an upload.
    - `get_per_1000_usd`: price of 1,000 GET and HEAD requests.
    - `delete_per_1000_usd`: price of 1,000 DELETE requests and aborted uploads.
    - `egress_per_gib_usd`: price of a GiB read; 0 within the region.
    - `storage_per_gib_month_usd`: price of a GiB stored for a month.
    - `as_of`: month of the list prices.
    """

    put_per_1000_usd: float = 0.005
    get_per_1000_usd: float = 0.0004
    delete_per_1000_usd: float = 0.0
    egress_per_gib_usd: float = 0.0
    storage_per_gib_month_usd: float = 0.023
    as_of: str = "2026-11"

    def __post_init__(self) -> None:
        for name in [name for name in self.__struct_fields__ if name.endswith("_usd")]:
            price = getattr(self, name)
            if not 0 <= price <= _MOST_USD:
                raise ConfigError(f"{name} must be from 0 to {_MOST_USD}, not {price!r}")

    def month_usd(self, stored_bytes: int) -> float:
        """Return the price of keeping bytes for a month."""
        return stored_bytes / 2**30 * self.storage_per_gib_month_usd

    def gap_bytes(self, most: int) -> int:
        """Return the number of needless bytes, at most `most`, whose price is that of the GET that they save."""
        byte_usd = self.egress_per_gib_usd / 2**30
        return int(min(most, self.get_per_1000_usd / 1000 / byte_usd)) if byte_usd else most

    def cost_usd(self, requests: Mapping[str, int], bytes_read: int) -> float:
        """Return the price of `requests` (operation -> count) and `bytes_read`, by `rounded_usd`."""
        total = bytes_read / 2**30 * self.egress_per_gib_usd
        for operation, count in requests.items():
            if operation == "delete_many":
                price = self.delete_per_1000_usd
            else:
                price = self.get_per_1000_usd if operation in _READS else self.put_per_1000_usd
            total += count * price / 1000
        return rounded_usd(total)
