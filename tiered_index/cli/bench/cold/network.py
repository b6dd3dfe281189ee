"""The storage that suite `cold` reads from: behind an injected latency whose sequence starts anew with every
measurement, or as it is.

Two ways of reading the same number of ranges then meet the same waits, so that few rounds tell them apart. Threads:
`begin` between measurements, everything else from any.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tiered_index.cli.bench.cold.amounts import MEDIAN_MS, SIGMA
from tiered_index.storage.base import Storage, WrapperStorage
from tiered_index.storage.wrappers import LatencyStorage

__all__ = ["Network", "raw_get"]

RawGet = Callable[[str, int, int], bytes]


class Network(WrapperStorage):
    """`storage`, slowed down where `injected`."""

    def __init__(self, storage: Storage, *, injected: bool) -> None:
        super().__init__(storage)
        self.storage = storage
        self.injected = injected

    def begin(self, seed: int) -> None:
        """Start the sequence of waits that `seed` decides."""
        if self.injected:
            self.inner = LatencyStorage(self.storage, seed, MEDIAN_MS, SIGMA)


def raw_get(network: Network, threads: int) -> RawGet:
    """Return a plain GET of a range by (name, start, length): a boto3 client of its own for S3, else the storage's."""
    # imported when asked for: every command imports this module, and few need boto3
    import boto3
    from botocore.config import Config

    from tiered_index.storage.s3.storage import S3Storage

    storage = network.storage
    if not isinstance(storage, S3Storage):
        return network.get_range

    options = storage.options
    style: Any = {"addressing_style": options.addressing_style or ("path" if options.endpoint_url else "auto")}
    client = boto3.Session(profile_name=options.profile, region_name=options.region).client(
        "s3", endpoint_url=options.endpoint_url, config=Config(max_pool_connections=threads + 4, s3=style)
    )
    bucket, prefix = storage.bucket, storage.uri.partition("?")[0].removeprefix(f"s3://{storage.bucket}").strip("/")

    def get(name: str, start: int, length: int) -> bytes:
        body: bytes = client.get_object(
            Bucket=bucket, Key=f"{prefix}/{name}", Range=f"bytes={start}-{start + length - 1}"
        )["Body"].read()
        return body

    return get
