"""The entries of objects, read only by the format's codec: without caches, filters, directories or lookups."""

import secrets
from collections.abc import Iterable

import numpy as np

from tests.support.changes import replace
from tests.support.model import ModelEntry, ReferenceModel
from tiered_index.format.compacted import Compaction
from tiered_index.format.keys.hashing import fingerprint, key_hash, lookup_numbers
from tiered_index.format.names import data_name
from tiered_index.format.trailer import Tail, Trailer, parse_trailer
from tiered_index.service.log.records import StoredObject
from tiered_index.service.log.state import LogState
from tiered_index.storage.base import Storage

Mark = tuple[str, int, int | None, int, int, int, int]
"""The fields that identify an entry in a file: topic, hash, fingerprint, queue_id, offset, size, second."""


def mark(entry: ModelEntry, *, keyed: bool) -> Mark:
    """Return an entry in the form of a file."""
    key = entry.topic, entry.key
    key_print = fingerprint(*key) if keyed else None
    return entry.topic, key_hash(*key), key_print, entry.queue_id, entry.offset, entry.size, entry.second


class Published:
    """The objects of a storage's log as model entries; `keys` are all keys that were ever put."""

    def __init__(self, storage: Storage, keys: Iterable[str], *, keyed: bool) -> None:
        self._storage = storage
        self._keys = tuple(keys)
        self._keyed = keyed
        self._known: dict[str, list[ModelEntry]] = {}
        # by topic and hash: the keys, each with its fingerprint
        self._by_hash: dict[str, dict[int, list[tuple[str, int]]]] = {}

    def entries(self, stored: StoredObject) -> list[ModelEntry]:
        """Return the entries of an object. An object never changes under its name, so each is read once."""
        if stored.name not in self._known:
            data = self._storage.get(stored.name)
            self._known[stored.name] = list(self._decode(stored, data))
            assert len(self._known[stored.name]) == stored.count
        return self._known[stored.name]

    def model(self, state: LogState) -> ReferenceModel:
        """Return the model of all entries that the log names."""
        model = ReferenceModel(keyed=self._keyed)
        model.entries = [entry for stored in state.objects.values() for entry in self.entries(stored)]
        return model

    def rewrite(self, stored: StoredObject) -> StoredObject:
        """Write an object's entries as a file of another id, and return it. The log does not name it yet."""
        data = self._storage.get(stored.name)
        trailer = _trailer(stored, data)
        metadata = trailer.metadata
        schema = metadata.layout.schema
        items = _items(stored, data, trailer)
        entries = np.zeros(len(items), schema.entry)
        for name in items.dtype.names or ():
            entries[name] = items[name][::-1]  # a chain is read from its newest end
        file_id = f"{stored.file_id[:15]}-{secrets.token_hex(6)}"
        compaction = Compaction(entries, metadata.layout, metadata.begin_ms, metadata.end_ms)
        names = ("topics", "source_positions", "lane", "offset_space", "writer", "more")
        about = {name: getattr(metadata, name) for name in names}
        whole = b"".join(bytes(piece) for piece in compaction.pieces(file_id=file_id, **about))
        tail = Tail.decode(whole, file_id, len(whole))
        lengths = {f"{part}_length": getattr(tail, f"{part}_length") for part in ("filter", "directory", "metadata")}
        where = {"name": data_name(file_id, secrets.token_hex(8)), "file_id": file_id, "size_bytes": len(whole)}
        fresh = replace(stored, trailer_position=tail.position, **where, **lengths)
        self._storage.put(fresh.name, whole)
        return fresh

    def _decode(self, stored: StoredObject, data: bytes) -> Iterable[ModelEntry]:
        trailer = _trailer(stored, data)
        metadata = trailer.metadata
        topics = dict(metadata.topics)
        begin_s = metadata.begin_ms // 1000
        for row in _items(stored, data, trailer):
            topic = topics[int(row["topic_id"])]
            (key, *_) = self._keys_of(topic, row)
            second = begin_s + int(row["time_diff_s"])
            yield ModelEntry(topic, key, int(row["queue_id"]), int(row["offset"]), int(row["size"]), second)

    def _keys_of(self, topic: str, row: np.void) -> list[str]:
        if topic not in self._by_hash:
            by_hash = self._by_hash[topic] = {}
            for key in self._keys:
                *hashes, of_key = lookup_numbers(topic, key)
                for number in set(hashes):
                    by_hash.setdefault(number, []).append((key, of_key))
        known = self._by_hash[topic].get(int(row["key_hash"]), [])
        return [key for key, of_key in known if not self._keyed or of_key == row["fingerprint"]]


def _items(stored: StoredObject, data: bytes, trailer: Trailer) -> np.ndarray:
    runs = trailer.directory.all_runs()
    cut = [data[run.offset : run.offset + run.length] for run in runs]
    parts = [trailer.metadata.items_of(part, run.count, stored.name) for part, run in zip(cut, runs, strict=True)]
    return np.concatenate(parts)


def _trailer(stored: StoredObject, data: bytes) -> Trailer:
    return parse_trailer(data[stored.directory_position :], stored.name, stored.size_bytes)
