"""The storage contract on a real server, and facts that only a real server shows."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.storage.conftest import WAYS
from tiered_index.errors import ObjectExists, StorageMisconfigured
from tiered_index.storage.base import Storage
from tiered_index.storage.opening import open_storage
from tiered_index.storage.probe import probe_put_if_absent
from tiered_index.storage.s3.options import S3Options
from tiered_index.storage.s3.storage import S3Storage
from tiered_index.testing.storage_conformance import StorageConformance

pytestmark = pytest.mark.real_s3


class TestRealS3(StorageConformance):
    """Read through obstore, and through boto3."""

    @pytest.fixture(params=WAYS.values(), ids=WAYS.keys())
    def options(self, request: pytest.FixtureRequest) -> S3Options:
        return S3Options(client=request.param)

    @pytest.fixture
    def storage(self, uri: str, options: S3Options) -> Iterator[Storage]:
        with open_storage(uri, options=options) as storage:
            yield storage

    @pytest.fixture
    def another(self, uri: str, options: S3Options) -> Iterator[Storage]:
        with open_storage(uri, options=options) as another:
            yield another


def test_the_server_keeps_put_if_absent(storage: S3Storage) -> None:
    probe_put_if_absent(storage, "probe/put-if-absent")
    assert list(storage.list()) == []


def test_thirty_two_racers_have_one_winner(storage: S3Storage) -> None:
    racers, rounds = 32, 10
    barrier = threading.Barrier(racers)

    def race(racer: int) -> list[int]:
        won = []
        for n in range(rounds):
            barrier.wait(60)
            try:
                storage.put_if_absent(f"log/{n:020d}", b"%d" % racer)
            except ObjectExists:
                continue
            won.append(n)
        return won

    with ThreadPoolExecutor(racers) as pool:
        wins = list(pool.map(race, range(racers)))
    assert sorted(n for won in wins for n in won) == list(range(rounds))
    assert all(storage.get(f"log/{n:020d}") == b"%d" % racer for racer, won in enumerate(wins) for n in won)


def test_ranges_of_a_large_object(storage: S3Storage) -> None:
    rng = random.Random(1)
    parts = [rng.randbytes(5 << 20) for _ in range(6)] + [b"the end"]
    with storage.open_writer("large") as writer:
        for part in parts:
            writer.write(part)
    data = b"".join(parts)
    assert storage.head("large").size_bytes == len(data)
    starts = [rng.randrange(len(data) - 20_000) for _ in range(100)] + [n * (5 << 20) - 10_000 for n in range(1, 6)]
    with ThreadPoolExecutor(8) as pool:
        assert all(
            pool.map(lambda start: storage.get_range("large", start, 20_000) == data[start : start + 20_000], starts)
        )


def test_wrong_credentials_are_refused(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "not-the-right-secret"
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    with open_storage(uri) as storage:
        for call in (lambda: storage.get("a"), lambda: storage.put("a", b"x"), lambda: list(storage.list())):
            with pytest.raises(StorageMisconfigured) as caught:
                call()
            assert secret not in str(caught.value)
