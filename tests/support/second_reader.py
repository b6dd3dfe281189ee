"""A second reader of packed files, written from SPEC.md alone with plain integers: sections 2, 6, 10 and 11."""

import json
import re
import zlib
from itertools import accumulate

_Column = tuple[str, int, bool]


def items_in(data: bytes) -> bytes:
    """Return the items of a packed file, in their order, as the bytes that section 2 defines."""
    tail = data[-64:]
    trailer, held, directory, metadata = (_number(tail[at : at + 8]) for at in (16, 24, 32, 40))
    assert (tail[:8], _number(tail[60:])) == (b"TIXTAIL\n", zlib.crc32(tail[:60]))
    start = trailer + held
    about = json.loads(data[start + directory : start + directory + metadata])
    runs = _runs(data[start : start + directory])
    assert [at for at, *_ in runs] == [28, *(at + length for at, length, *_ in runs[:-1])]
    items = []
    for at, length, crc32, count in runs:
        assert zlib.crc32(data[at : at + length]) == crc32
        items += _items(data[at : at + length], count, about)
    return b"".join(items)


def _number(data: bytes, *, signed: bool = False) -> int:
    return int.from_bytes(data, "big", signed=signed)


def _runs(directory: bytes) -> list[tuple[int, int, int, int]]:
    """Return position, length, CRC32 and count of each run."""
    groups, blocks = _number(directory[:4]), _number(directory[4:8])
    rows = [directory[8 + 32 * n :][:32] for n in range(groups)]
    cuts = [directory[8 + 32 * groups + 44 * n :][:44] for n in range(blocks)]
    runs = []
    for row in rows:
        _, count, at, length, crc32, first, number = (_number(row[a:b]) for a, b in _places(4, 4, 8, 4, 4, 4, 4))
        if number:
            parts = [[_number(cut[a:b]) for a, b in _places(8, 4, 4, 4)] for cut in cuts[first : first + number]]
            runs += [(at, length, crc32, count) for at, length, count, crc32 in parts]
        elif count:
            runs.append((at, length, crc32, count))
    return runs


def _places(*sizes: int) -> list[tuple[int, int]]:
    ends = list(accumulate(sizes))
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _columns(schema: list[list[str]]) -> list[_Column]:
    """Return name, bytes and sign of each number of an item, in the schema's order."""
    columns = []
    for name, kind, _ in schema:
        letter, size = re.fullmatch(r"[>|]([a-zA-Z])(\d+)", kind).groups()  # type: ignore[union-attr]
        left = int(size)
        if letter in "iuf":
            columns.append((name, left, letter == "i"))
            continue
        while left:
            part = next(each for each in (8, 4, 2, 1) if each <= left)
            columns.append((f"{name} {left}", part, False))
            left -= part
    return columns


def _items(run: bytes, count: int, about: dict) -> list[bytes]:
    base, line = about["layout"]["slots"], about["packed"]
    columns = _columns(about["layout"]["schema"]["columns"])
    names = [name for name, *_ in columns]
    of_keys = ["key_hash", *(name for name in names if name in ("topic_id", "fingerprint"))]
    of_items = [name for name in names if name not in (*of_keys, "offset", "time_diff_s")] + ["offset", "time_diff_s"]
    size_of = {name: (size, signed) for name, size, signed in columns}
    kind, n, at = run[0], _number(run[1:5]), 5
    header = {}
    for name in (*of_keys, *of_items):
        size, signed = (8, True) if name in ("key_hash", "offset", "time_diff_s") else size_of[name]
        header[name] = run[at], _number(run[at + 1 : at + 1 + size], signed=signed)
        at += 1 + size

    def rows(chosen: list[str], number: int) -> list[dict[str, int]]:
        nonlocal at
        length = -(-number * sum(header[name][0] for name in chosen) // 8)
        value = int.from_bytes(run[at : at + length], "little")
        at += length
        read: list[dict[str, int]] = []
        for _ in range(number):
            read.append({})
            for name in chosen:
                bits, least = header[name]
                read[-1][name] = least + value % 2**bits
                value >>= bits
        return read

    keys = rows(of_keys, n)
    quotients = (2**31 - 1) // base + 1
    rank = 0
    for number, key in enumerate(keys):
        if kind == 1:
            rank += key["key_hash"] - (header["key_hash"][1] if number else 0)
            key["key_hash"] = rank % quotients * base + rank // quotients
    first = 2**count - 1
    if n < count:
        first = int.from_bytes(run[at : at + -(-count // 8)], "little")
        at += -(-count // 8)
    readings, which = [], -1
    for number, item in enumerate(rows(of_items, count)):
        which += first >> number & 1
        row = keys[which] | item
        if "topics" in about["packed"]:
            row["topic_id"] = about["packed"]["topics"][row["topic_id"]]
        row["time_diff_s"] += _line(line, _signed(row["offset"]))
        readings.append(b"".join((row[name] % 2 ** (8 * size)).to_bytes(size, "big") for name, size, _ in columns))
    assert (which, at) == (n - 1, len(run))
    return readings


def _signed(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63


def _line(line: dict, offset: int) -> int:
    base, shift, seconds = line["base"], line["shift"], line["seconds"]
    a = _signed(offset - base)
    i = min(max(a >> shift, 0), len(seconds) - 2)
    return seconds[i] + (_signed((a - (i << shift)) * (seconds[i + 1] - seconds[i])) >> shift)
