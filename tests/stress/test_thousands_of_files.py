"""Roots of many small files: filled, asked, closed, opened again, and brought to the storage."""

from __future__ import annotations

import random
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stress.ledger import ALL, Ledger
from tests.stress.traffic import KEYS, NOW_MS, SPAN_S, TOPICS, Source, batch_of
from tiered_index import IndexReader
from tiered_index.storage.memory import MemoryStorage
from tiered_index.types import Lookup

PUT_AT_ONCE = 200


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    """As many as the system allows: each sealed file keeps some open until it is compacted, each local one its
    mapping's.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def fill(service, ledger, source, files, items):
    """Put messages until there are that many files."""
    while len(service.files()) < files:
        messages = source.messages(PUT_AT_ONCE)
        ledger.offer(messages)
        service.put_batch(batch_of(messages, arrow=True))
        ledger.acknowledge(messages)
        service.flush()
    assert all(handle.count <= items - 1 for handle in service.files())


def ask_ranges(index, ledger, rng, count):
    """Narrow and wide ranges; a narrow one reads few files."""
    for _ in range(count):
        begin_ms = NOW_MS + 1000 * rng.randrange(-SPAN_S, SPAN_S)
        end_ms = begin_ms + rng.choice((0, 10**5))
        q = Lookup(topic=rng.choice(TOPICS), key=rng.choice(KEYS), begin_ms=begin_ms, end_ms=end_ms, max_count=ALL)
        result = index.query(q.topic, q.key, begin_ms, end_ms, ALL)
        ledger.check(q, result, ledger.moment(q.topic, q.key))


def live_through(open_index, folder: Path, files: int, items: int) -> None:
    ledger, rng, storage = Ledger(), random.Random(files), MemoryStorage()
    settings = {"storage_backend": storage, "background": False, "local_keep_s": 0.0}
    service = open_index(items=items, **settings)
    source = Source(files, 1, bad_clocks=False)
    fill(service, ledger, source, files, items)
    made = len(service.files())
    assert made >= files
    ask_ranges(service, ledger, rng, 50)
    service.close()

    service = open_index(**settings)
    assert len(service.files()) == made
    assert {handle.place for handle in service.files()} == {"unsealed"}
    ledger.check_whole(service.query)
    with IndexReader.open(root=folder / "root", storage_backend=storage) as beside:
        ask_ranges(beside, ledger, rng, 3)
    service.run_lifecycle()
    ask_ranges(service, ledger, rng, 20)
    service.close()

    service = open_index(**settings)
    assert len(service.files()) == made
    service.seal()
    service.run_lifecycle()
    service.run_lifecycle()
    assert {handle.place for handle in service.files()} == {"storage"}
    assert not list((folder / "root").rglob("*.index"))
    ask_ranges(service, ledger, rng, 20)
    with IndexReader.open(storage_backend=storage) as reader:
        assert len(reader.files()) == len(service.files())
        ledger.check_whole(reader.query)


def test_a_hundred_files(open_index, tmp_path, many_descriptors):
    live_through(open_index, tmp_path, 100, 6)


@pytest.mark.slow
def test_two_and_a_half_thousand_files(open_index, tmp_path, many_descriptors):
    live_through(open_index, tmp_path, 2500, 6)
