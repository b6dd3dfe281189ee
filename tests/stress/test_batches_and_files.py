"""Batches larger than a file, files that fill in the middle of a batch, and messages of several keys at a file's
end.
"""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.stress.traffic import NOW_MS, batch_of
from tests.support.model import Message, Moments
from tiered_index import IndexReader, IndexService
from tiered_index.storage.memory import MemoryStorage

# (how many messages, how many keys each, as a batch or one by one)
_PUT = st.tuples(st.integers(0, 30), st.integers(1, 5), st.booleans())
_STEPS = st.lists(st.one_of(_PUT, st.sampled_from(["flush", "seal", "life"])), min_size=1, max_size=6)


def messages_of(count: int, keys: int, first: int) -> list[Message]:
    """Return messages `first`, `first` + 1, ...; their times go up and down."""

    def message(number: int) -> Message:
        names = tuple(f"k{(number + key) % 11}" for key in range(keys))
        return Message("t", number % 3, names, number, 1 + number, NOW_MS + number * 7919 % 90_000)

    return [message(number) for number in range(first, first + count)]


def put(service: IndexService, moments: Moments, messages: list[Message], *, batch: bool) -> None:
    moments.offer(messages)
    if not messages:
        return
    if batch:
        made = service.put_batch(batch_of(messages, arrow=len(messages) % 2 == 0), "log", messages[-1].offset)
    else:
        made = sum(service.put(*message.arguments, "log", message.offset) for message in messages)
    assert made == sum(len(message.keys) for message in messages)
    moments.acknowledge(messages)


@settings(max_examples=4)
@given(items=st.integers(2, 24), preset=st.sampled_from(["native", "rocketmq"]), steps=_STEPS)
@example(items=2, preset="native", steps=[(12, 5, True)])  # a file an entry
@example(items=11, preset="rocketmq", steps=[(10, 1, True), (10, 1, True), "flush"])  # full to the entry, twice
# keys on both sides of an end
@example(items=11, preset="native", steps=[(9, 1, False), "flush", (1, 9, False), "flush", (2, 9, False)])
def test_every_size_of_batch_fills_every_size_of_file(disk, tmp_path_factory, items, preset, steps):
    storage, moments = MemoryStorage(), Moments()
    settled = {
        "root": tmp_path_factory.mktemp("root"),
        "storage_backend": storage,
        "disk": disk,
        "background": False,
        "query_threads": 2,
    }
    service = IndexService.open(slots=5, items=items, preset=preset, local_keep_s=0.0, **settled)
    try:
        entries = last = 0
        for step in steps:
            if isinstance(step, tuple):
                count, keys, batch = step
                put(service, moments, messages_of(count, keys, last), batch=batch)
                last, entries = last + count, entries + count * keys
            elif step == "flush":
                service.flush()
            else:
                service.seal()
                if step == "life":
                    service.run_lifecycle()
            moments.check_whole(service.query)
        service.flush()
        assert service.health()["buffered_entries"] == 0
        assert service.durable_position("log") == (last - 1 if last else None)
        files = service.files()
        assert sum(handle.count for handle in files) == entries
        assert all(0 < handle.count <= items - 1 for handle in files)
        # without a seal every file but the last is full
        if not any(step in ("seal", "life") for step in steps):
            assert [handle.count for handle in files[:-1]] == [items - 1] * (len(files) - 1)
        moments.check_whole(service.query)
        service.close()
        service = IndexService.open(local_keep_s=0.0, **settled)
        moments.check_whole(service.query)
        service.seal()
        service.run_lifecycle()
        with IndexReader.open(storage_backend=storage, query_threads=2) as reader:
            moments.check_whole(reader.query)
    finally:
        service.abandon()


def test_a_message_of_more_keys_than_a_file_has_room_is_accepted_whole(open_index):
    service, moments = open_index(items=4, storage_backend=MemoryStorage(), background=False), Moments()
    message = Message("t", 0, tuple(f"k{number}" for number in range(20)), 1, 1, NOW_MS)
    put(service, moments, [message], batch=False)
    service.flush()
    assert [handle.count for handle in service.files()] == [3, 3, 3, 3, 3, 3, 2]
    assert moments.check_whole(service.query) == 20
