"""LMDB: the key's hash is the key, its entries are sorted duplicates of fixed size.

The settings are those that py-lmdb's documentation advises: synced commits (its default), `putmulti` and `getmulti`,
one read transaction per lookup, and no read-ahead for random reads.
"""

import os
import struct
from typing import Any

import numpy as np
import pyarrow as pa

from tests.benchmarks.memory import disk_bytes
from tests.benchmarks.peers.data import KEY_BYTES, ROW, hash_of, packed
from tests.benchmarks.peers.protocol import Peer

_KEY = struct.Struct(">q")
_REST = struct.Struct(">qiiii")
_MAP_BYTES = 1 << 40


class Lmdb(Peer):
    """A B+ tree in one mapped file. It needs no recovery. When settled, it is a copy without its free pages."""

    name = "LMDB"
    modules = ("lmdb",)

    def open(self) -> None:
        import lmdb

        self._env = lmdb.open(str(self.folder / "lmdb"), map_size=_MAP_BYTES, max_dbs=1, readahead=False)
        self._entries = self._env.open_db(b"entries", dupsort=True, dupfixed=True)

    def prepare(self, entries: pa.RecordBatch) -> Any:
        raw, size = packed(entries).tobytes(), ROW.itemsize
        return [(raw[at : at + KEY_BYTES], raw[at + KEY_BYTES : at + size]) for at in range(0, len(raw), size)]

    def put_batch(self, prepared: Any) -> None:
        with self._env.begin(self._entries, write=True) as transaction, transaction.cursor() as cursor:
            cursor.putmulti(prepared)

    def lookup(self, key: str) -> Any:
        with self._env.begin(self._entries) as transaction, transaction.cursor() as cursor:
            is_present = cursor.set_key(_KEY.pack(hash_of(key)))
            return [_REST.unpack(row) for row in cursor.iternext_dup()] if is_present else []

    def lookup_many(self, keys: list[str]) -> Any:
        wanted = [_KEY.pack(hash_of(key)) for key in keys]
        with self._env.begin(self._entries) as transaction, transaction.cursor() as cursor:
            size = ROW.itemsize - KEY_BYTES
            pairs = cursor.getmulti(wanted, dupdata=True, dupfixed_bytes=size, keyfixed=True)
            return np.frombuffer(bytes(pairs), ROW)

    def settle(self) -> None:
        compact = self.folder / "compact"
        compact.mkdir()
        self._env.copy(str(compact), compact=True)
        self._env.close()
        with (compact / "data.mdb").open("rb") as file:
            os.fsync(file.fileno())
        (compact / "data.mdb").rename(self.folder / "lmdb" / "data.mdb")
        compact.rmdir()
        self.open()

    def close(self) -> None:
        self._env.close()

    def stored_bytes(self) -> int:
        return disk_bytes(self.folder / "lmdb")
