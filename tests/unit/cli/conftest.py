"""Fixtures that make source files for the command line's tests."""

import json
import random

import pytest

BEGIN_MS = 1_700_000_000_000


def message(number, **changes):
    """Return message `number` as an NDJSON line's fields."""
    fields = {
        "topic": "orders" if number % 3 else "payments",
        "queue_id": number % 4,
        "keys": [f"k{number % 7}", f"u{number % 5}"],
        "offset": number,
        "size": 100 + number % 50,
        "timestamp_ms": BEGIN_MS + number * 1000,
    }
    return fields | changes


@pytest.fixture
def make_message():
    return message


@pytest.fixture
def write_lines(tmp_path):
    """Return a function that writes values, one per line, and returns the path. A dict is written as JSON."""

    def write(values, name="messages.ndjson"):
        path = tmp_path / name
        lines = [value if isinstance(value, bytes) else json.dumps(value).encode() for value in values]
        path.write_bytes(b"".join(line + b"\n" for line in lines))
        return path

    return write


def damaged(data, count):
    """Yield damaged copies of a file whose last eight bytes begin with the length of its footer. Half the damage is in
    it.

    The kinds of damage are a flipped bit, many other bytes, a cut, inserted bytes and zeroes. The seed is fixed.
    """
    chance = random.Random(7)
    footer_bytes = min(int.from_bytes(data[-8:-4], "little"), len(data) - 16)
    for number in range(count):
        copy = bytearray(data)
        places = range(len(data) - 8 - footer_bytes, len(data)) if number % 2 else range(4, len(data))
        kind, place = number % 5, chance.choice(places)
        if kind == 0:
            copy[place] ^= 1 << chance.randrange(8)
        elif kind == 1:
            for _ in range(20):
                copy[chance.choice(places)] = chance.randrange(256)
        elif kind == 2:
            del copy[place:]
        elif kind == 3:
            copy[place:place] = chance.randbytes(chance.randrange(1, 30))
        else:
            copy[place : place + 100] = bytes(len(copy[place : place + 100]))
        yield bytes(copy)


@pytest.fixture
def damaged_copies():
    return damaged
