"""RocksDB by rocksdict: an entry is a pair with the key's hash as prefix.

The settings are those that the wiki's "Setup Options and Basic Tuning" and "RocksDB Tuning Guide" advise. Blocks have
16 KiB, Bloom filters 10 bits per key, and the block cache holds index and filters. Level bytes are dynamic, with LZ4,
and ZSTD at the bottom. Each batch is one synced write.
"""

import os
import struct
from typing import Any

import numpy as np
import pyarrow as pa

from tests.benchmarks.memory import disk_bytes
from tests.benchmarks.peers.data import KEY_BYTES, ROW, hash_of, packed
from tests.benchmarks.peers.protocol import CACHE_BYTES, Peer

# offset, queue and topic are the rest of the pair's key
_PAIR_KEY_BYTES = KEY_BYTES + 16
_PREFIX = struct.Struct(">q")
_REST = struct.Struct(">qiiii")
_SMALL_BUFFER = 4 << 20


class RocksDb(Peer):
    """A lookup is a seek to the prefix. Prefixes have no batch interface: a batch of keys shares one iterator."""

    name = "RocksDB"
    modules = ("rocksdict",)

    def open(self) -> None:
        import rocksdict as rocks

        options = rocks.Options(raw_mode=True)
        options.create_if_missing(True)
        options.increase_parallelism(max(2, os.cpu_count() or 2))
        options.set_level_compaction_dynamic_level_bytes(True)
        options.set_bytes_per_sync(1 << 20)
        options.set_compression_type(rocks.DBCompressionType.lz4())
        options.set_bottommost_compression_type(rocks.DBCompressionType.zstd())
        options.set_prefix_extractor(rocks.SliceTransform.create_fixed_prefix(KEY_BYTES))
        # RocksDB writes a full buffer while others fill, as "Write Stalls" advises
        options.set_max_write_buffer_number(4)
        if self.small:
            options.set_write_buffer_size(_SMALL_BUFFER)
        table = rocks.BlockBasedOptions()
        table.set_block_size(16 << 10)
        table.set_bloom_filter(10, False)
        table.set_block_cache(rocks.Cache(CACHE_BYTES))
        table.set_cache_index_and_filter_blocks(True)
        table.set_pin_l0_filter_and_index_blocks_in_cache(True)
        table.set_format_version(5)
        options.set_block_based_table_factory(table)
        self._rocks = rocks
        # once more for the column family: otherwise rocksdict reopens it without its filter
        self._db = rocks.Rdict(str(self.folder / "rocksdb"), options, column_families={"default": options})
        # lookups use only prefixes, and rocksdict has no call for this setting
        self._db.set_options({"block_based_table_factory": "{whole_key_filtering=false}"})
        self._write = rocks.WriteOptions()
        self._write.sync = True
        self._read = rocks.ReadOptions()
        self._read.set_prefix_same_as_start(True)

    def prepare(self, entries: pa.RecordBatch) -> Any:
        raw = packed(entries).tobytes()
        batch = self._rocks.WriteBatch(raw_mode=True)
        put, size, cut = batch.put, ROW.itemsize, _PAIR_KEY_BYTES
        for at in range(0, len(raw), size):
            put(raw[at : at + cut], raw[at + cut : at + size])
        return batch

    def put_batch(self, prepared: Any) -> None:
        self._db.write(prepared, self._write)

    def lookup(self, key: str) -> Any:
        return [_REST.unpack(row[KEY_BYTES:]) for row in self._rows(self._db.iter(self._read), key)]

    def lookup_many(self, keys: list[str]) -> Any:
        pairs = self._db.iter(self._read)
        return np.frombuffer(b"".join(row for key in keys for row in self._rows(pairs, key)), ROW)

    def _rows(self, pairs: Any, key: str) -> list[bytes]:
        prefix = _PREFIX.pack(hash_of(key))
        pairs.seek(prefix)
        rows = []
        while pairs.valid() and (row_key := pairs.key()).startswith(prefix):
            rows.append(row_key + pairs.value())
            pairs.next()
        return rows

    def settle(self) -> None:
        self._db.flush()
        # forced, so that the bottom level's compression rewrites files that would only move there
        compact = self._rocks.CompactOptions()
        compact.set_bottommost_level_compaction(self._rocks.BottommostLevelCompaction.force_optimized())
        self._db.compact_range(None, None, compact)

    def close(self) -> None:
        self._db.close()

    def stored_bytes(self) -> int:
        return disk_bytes(self.folder / "rocksdb")
