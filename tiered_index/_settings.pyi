"""The settings by name; None counts as not given. `python -m tests.support.settings_stub` makes it."""

from pathlib import Path
from typing import Any, Literal, TypedDict

from tiered_index.config import OffsetSpace
from tiered_index.retention import Retention
from tiered_index.storage.prices import PriceTable
from tiered_index.storage.s3.options import S3Options
from tiered_index.types import IndexItem

class IndexSettings(TypedDict, total=False):
    preset: Literal["native", "rocketmq"] | None
    hash: Literal["abs", "mask"] | None
    slots: int | None
    items: int | None
    offset_space: OffsetSpace | None
    flush_interval_s: float | None
    buffer_max_entries: int | None
    buffer_max_bytes: int | None
    disk_max_bytes: int | None
    seal_after_s: float | None
    compaction: Literal["local", "spark"] | None
    compact_timeout_s: float | None
    local_keep_s: float | None
    local_keep_bytes: int | None
    max_late_s: float | None
    max_early_s: float | None
    upload_part_bytes: int | None
    query_threads: int | None
    coalesce_gap_bytes: int | Literal["price"] | None
    block_cache_bytes: int | None
    directory_cache_bytes: int | None
    cache_dir: str | Path | None
    cache_max_bytes: int | None
    filter_after_probes: int | None
    prices: PriceTable | dict[str, Any] | None
    retention: Retention | dict[str, Any] | None
    lease_ttl_s: float | None
    lifecycle_interval_s: float | None
    refresh_interval_s: float | None
    source_timeout_s: float | None
    checkpoint_every: int | None
    background: bool | None
    raise_file_limit: bool | None
    s3: S3Options | dict[str, Any] | None

class Settings(IndexSettings, total=False):
    root: str | Path | None
    storage: str | None
    item_type: type[IndexItem] | None
