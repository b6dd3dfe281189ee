"""The compiled `add` and `append_rows` take the same messages, and leave the same entries, positions and errors."""

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.batches import batch
from tests.support.core import compiled_core, using
from tests.support.disk_faults import FaultDisk
from tiered_index import IndexService
from tiered_index.base.units import MAX_TIMESTAMP_MS
from tiered_index.errors import TieredIndexError
from tiered_index.storage.memory import MemoryStorage
from tiered_index.types import MAX_KEY_UNITS

T = 1_700_000_000_000


class Text(str):
    __slots__ = ()


# each field's usual values, and odd ones
USUAL = {
    "topic": ("t", "u", "\u00e9", "\U0001f600"),
    "queue_id": (0, 1, 2**31 - 2),
    "offset": (0, 1, 2, 2**63 - 1),
    "size": (1, 7, 2**31 - 1),
    "timestamp_ms": (0, T, T + 999, T + 5000, MAX_TIMESTAMP_MS),
    "source": (None, "r", "s", "\u00e9"),
    "source_position": (0, 1, 2, 3, 10, 2**63 - 1),
}
ODD = {
    "topic": ("", " ", b"t", None, Text("t"), "\ud800", "x" * 1025),
    "queue_id": (True, -1, 2**31 - 1, 2**31, 2**64, "1", 1.0, None, np.int32(1)),
    "offset": (False, -1, 2**63, 2**200, "1", None, np.int64(2), np.uint64(2**63)),
    "size": (True, -1, 2**31, 2**64, 1.5, None, np.int16(7)),
    "timestamp_ms": (True, -1, MAX_TIMESTAMP_MS + 1, 2**64, None, np.int64(T)),
    "source": (None, "", 5, b"s", Text("s"), "\ud800", "kafka:w/0", "rows:x", "read:kafka:w/0"),
    "source_position": (None, True, -1, 2**63, 2**200, "1", np.int64(3)),
}
KEYS = ("a", "b", "c", "ab", "\u00e9", "e\u0301", "\u4e2d", "\U0001f600", "x" * (MAX_KEY_UNITS // 2))
ODD_KEYS = (
    "",
    "\ud800",
    "a\udfff",
    5,
    None,
    b"a",
    Text("a"),
    "x" * MAX_KEY_UNITS,
    "\U0001f600" * (MAX_KEY_UNITS // 2 + 1),
)
MAKERS = (list, tuple, set, frozenset, iter, dict.fromkeys)


def random_keys(rng):
    """Return a function that makes the same keys anew with each call."""
    kind = rng.random()
    if kind < 0.3:
        keys = rng.choice(KEYS)
    elif kind < 0.35:
        keys = rng.choice(ODD_KEYS)
    else:
        count = rng.choice((0, 1, 2, 2, 2, 3, 5, 9)) if kind < 0.95 else rng.choice((31, 32, 33, 70))
        distinct = [*KEYS, *(f"k{number}" for number in range(70))]
        keys = rng.choices(distinct, k=count) if kind < 0.5 else rng.sample(distinct, count)
        if keys and rng.random() < 0.1:
            keys[rng.randrange(count)] = rng.choice(ODD_KEYS)
        make = rng.choice(MAKERS[:2] if kind < 0.9 else MAKERS)
        return lambda: make(keys)
    return lambda: keys


def random_call(rng):
    fields = {name: rng.choice(values) for name, values in USUAL.items()}
    if rng.random() < 0.25:
        name = rng.choice([*ODD])
        fields[name] = rng.choice(ODD[name])
    if fields["source"] is None and fields["source_position"] is not None and rng.random() < 0.95:
        fields["source_position"] = None
    more = {} if rng.random() < 0.95 else rng.choice([{"topic_id": 5}, {"topic_id": -1}, {"color": 1}])
    keys = random_keys(rng)
    return "put", lambda: fields | {"keys": keys()} | more


def random_step(rng):
    kind = rng.random()
    if kind < 0.93:
        return random_call(rng)
    if kind < 0.96:
        source = rng.choice([None, "s", "kafka:w/0"])
        columns, position = batch(rng.randrange(4)), None if source is None else rng.randrange(9)
        return "put_source_batch", lambda: {"columns": columns, "source": source, "source_position": position}
    return rng.choice(["close_chunk", "merge", "flush"]), dict


class Side:
    """An index, with or without the compiled core; `taken` has the kinds of messages that `add` has taken."""

    def __init__(self, folder, core):
        self.core, self.taken, self.appended = core, set(), 0
        with using(core):
            self.index = IndexService.open(
                root=folder, storage_backend=MemoryStorage(), disk=FaultDisk(), background=False, buffer_max_entries=60
            )
        self.buffer = self.index._buffer
        self.general, self.buffer.append_rows = self.buffer.append_rows, self.append_rows

    def append_rows(self, *arguments):
        self.appended += 1
        self.general(*arguments)

    def step(self, name, arguments):
        """Return the outcome of a step, and the buffer after it."""
        with using(self.core):
            outcome = getattr(self, name)(**arguments())
            return outcome, self.state()

    def put(self, **values):
        appended = self.appended
        try:
            count = self.index.put(**values)
        except TieredIndexError as error:
            return f"{type(error).__name__}: {error}"
        if self.appended == appended:
            self.taken.add((type(values["keys"]), values["source"] is not None))
        return count

    def put_source_batch(self, **values):
        try:
            return self.index.put_source_batch(**values)
        except TieredIndexError as error:
            return f"{type(error).__name__}: {error}"

    def close_chunk(self):
        return self.buffer.close_chunk()

    def merge(self):
        self.buffer.snapshot()

    def flush(self):
        self.buffer.close_chunk()
        self.buffer.begin_flush(10**6)
        self.buffer.end_flush()

    def state(self):
        buffer = self.buffer
        chunks = [
            (chunk.number, chunk.count, chunk.size_bytes, marks_of(chunk), columns_of(chunk))
            for chunk in (*buffer._flushing, *buffer._ready)
        ]
        rows = buffer.open.rows
        content = rows.keys[:], bytes(rows.data[: len(rows.keys) * 28]), rows.size_bytes, marks_of(buffer.open)
        sizes = buffer.size, buffer.size_bytes, buffer.taken_entries, buffer.is_empty, buffer.refused
        return chunks, content, sizes, str(buffer.refusal)


def marks_of(part):
    marks = part.marks
    return dict(marks.positions), list(marks.sources.items()), marks._table().tolist()


def columns_of(chunk):
    return {name: values.tolist() for name, values in chunk.columns().items()}


@pytest.fixture(scope="module")
def sides(tmp_path_factory):
    core = compiled_core()
    both = [Side(tmp_path_factory.mktemp("puts") / name, of) for name, of in (("core", core), ("plain", None))]
    yield both
    of_core, plain = both
    for side in both:
        side.index.abandon()
    # otherwise both have gone the general way, and nothing was compared
    assert not plain.taken
    assert of_core.taken == set(itertools.product((str, list, tuple), (False, True)))


@settings(max_examples=150)
@given(seed=st.integers(0, 2**32))
def test_compiled_puts_leave_the_buffer_of_the_general_way(sides, seed):
    rng = random.Random(seed)
    for name, arguments in [random_step(rng) for _ in range(30)]:
        of_core, plain = (side.step(name, arguments) for side in sides)
        assert of_core == plain
