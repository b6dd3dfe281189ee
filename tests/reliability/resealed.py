"""Changes the content of valid bytes, and corrects all checksums and lengths, as a broken or malicious writer would.

Each function takes a `random.Random` and the bytes of one object, and returns changed bytes. It changes a value of a
document, a cell of an array, a field of a fixed structure, or whole members. A changed value has another type, or is
negative, huge, missing, doubled, swapped, off by one, overlapping or out of order. `flipped` changes bytes and corrects
nothing. Pure.
"""

import base64
import copy
import json
import struct
import zlib
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np

from tiered_index.format.layout import HEADER_SIZE
from tiered_index.format.segments.archived import SEGMENT_MAGIC
from tiered_index.format.trailer import BLOCK_DTYPE, FORMAT_VERSION, GROUP_DTYPE, TAIL_SIZE
from tiered_index.service.log.checkpoint import CHECKPOINT_VERSION

Reseal = Callable[[Random, bytes], bytes]
INTEGERS = (
    *(0, 1, -1, 2, 7, 127, 128, 255, 256, 4095, 65_536, 2**24, 2**28, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 1, 2**32),
    *(2**40, 2**53, 2**62, 2**63 - 1, 2**63, 2**64, -(2**31), -(2**31) - 1, -(2**62), -(2**63), -(2**63) - 1),
    *(10**30, 10**4200, 253_402_300_799, 253_402_300_800_000),
)
_LOG = "log/00000000000000000001"
_PATHS = ("../../outside", "/outside", "a/../../../outside", f"data/../{_LOG}", _LOG, "\0", "a\0b", "")
VALUES: tuple[Any, ...] = (
    *INTEGERS,
    *_PATHS,
    *(True, False, None, 0.5, -0.0, 1e308, float("nan"), float("inf"), float("-inf")),
    *("x", "\ud800", "\U0001f600", "9" * 400, "\x1b[31m", "é" * 300, [], {}, [[]], {"": None}, [None]),
    *("native", "rocketmq", "main", ">i4", "S999999999", ">u4,>u4", "O", "__class__"),
)
_NO_DOCUMENTS = (
    *(b"", b"[]", b"{}", b"null", b"NaN", b"1", b'"x"', b"\xff\xfe{\0}\0", b"{" * 2000, b"[" * 5000 + b"]" * 5000),
    *(b'{"a":' * 900 + b"1" + b"}" * 900, b"9" * 5000, b'{"version":1}', b'{"kind":"open"}'),
)
_TAIL = struct.Struct(">8sIIQQQQIIII")


def flipped(rng: Random, data: bytes) -> bytes:
    """Flip bits, or overwrite, cut, double or insert bytes, without correcting checksums."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        at = rng.randrange(len(changed) + 1) if changed else 0
        how = rng.randrange(6)
        if how == 0 and at < len(changed):
            changed[at] ^= 1 << rng.randrange(8)
        elif how == 1 and at < len(changed):
            changed[at] = rng.randrange(256)
        elif how == 2:
            del changed[at:]
        elif how == 3:
            del changed[at : at + rng.randrange(1, 40)]
        elif how == 4:
            changed[at:at] = changed[at : at + rng.randrange(1, 40)] or b"\0"
        else:
            changed[at : at + 8] = rng.randbytes(8)
    return bytes(changed)


# documents


def document(rng: Random, value: Any) -> Any:
    """Return a changed copy of a JSON value."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        places = list(_places(value))
        if not places:
            return rng.choice(VALUES)
        # members of long lists must not outweigh the fields around them
        fields = [place for place in places if isinstance(place[0], dict)]
        owner, key = rng.choice(places if rng.random() < 0.5 else fields or places)
        _change(rng, owner, key, places)
    return value


def _places(value: Any) -> Any:
    members = value if isinstance(value, dict) else dict(enumerate(value)) if isinstance(value, list) else {}
    for key, member in list(members.items()):
        yield value, key
        yield from _places(member)


def _change(rng: Random, owner: Any, key: Any, places: list[Any]) -> None:
    try:
        old = owner[key]
    except (IndexError, KeyError):
        return  # an earlier change has removed it
    how = rng.randrange(10)
    if how < 3:
        owner[key] = rng.choice(VALUES)
    elif how < 6 and type(old) is int:
        near = (old + 1, old - 1, -old, old * 2, old // 2)
        owner[key] = rng.choice((*near, old + rng.choice(INTEGERS), rng.choice(INTEGERS)))
    elif how < 6 and type(old) is str:
        near = (old + "x", old[:-1], old[1:], old.upper(), old * 2)
        owner[key] = rng.choice((*near, rng.choice(_PATHS), old.replace("/", "/../")))
    elif how == 6:
        del owner[key]
    elif how == 7:
        other_owner, other_key = rng.choice(places)
        try:
            other = other_owner[other_key]
        except (IndexError, KeyError, TypeError):
            return
        owner[key] = copy.deepcopy(other)
        if rng.random() < 0.5:
            other_owner[other_key] = copy.deepcopy(old)  # it may contain its new place
    elif how == 8 and isinstance(owner, list):
        owner.insert(rng.randrange(len(owner) + 1), copy.deepcopy(old))
    elif how == 8:
        owner[rng.choice(("x", "", "more", "name", "\ud800"))] = copy.deepcopy(old)
    elif isinstance(old, list):
        near = (old[::-1], old[1:], old[:-1], old * 2, rng.sample(old, len(old)))
        owner[key] = rng.choice((*near, dict.fromkeys(map(str, range(3)), 0)))
    elif isinstance(old, dict):
        owner[key] = rng.choice((list(old.items()), list(old), {name: {} for name in old}, list(old.values())))


def _json(rng: Random, value: Any) -> bytes:
    """Return the bytes of a changed document, or sometimes of other JSON or no JSON."""
    odd = rng.random()
    if odd < 0.02:
        return rng.choice(_NO_DOCUMENTS)
    encoded = json.dumps(document(rng, value), separators=(",", ":")).encode()
    if odd < 0.06 and encoded.startswith(b"{") and len(encoded) > 2:
        name = rng.choice(sorted(value)) if isinstance(value, dict) and value else "x"
        return encoded[:-1] + b"," + json.dumps({name: rng.choice(VALUES)})[1:-1].encode() + b"}"  # a name twice
    return encoded


def plain_json(rng: Random, data: bytes) -> bytes:
    """Change a document without a checksum."""
    return _json(rng, json.loads(data))


def sealed_json(rng: Random, data: bytes) -> bytes:
    """Change a document of the log, and correct the line with its CRC32."""
    return sealed(_json(rng, unsealed(data)))


def checkpoint(rng: Random, data: bytes) -> bytes:
    """Change the compressed state of a checkpoint, and compress it again."""
    return packed(_json(rng, unpacked(data)))


def unpacked(data: bytes) -> Any:
    """Return the document of the state in a checkpoint."""
    return json.loads(zlib.decompress(base64.b64decode(unsealed(data)["state"])))


def packed(text: bytes) -> bytes:
    """Return a checkpoint of a state's text."""
    state = base64.b64encode(zlib.compress(text)).decode()
    return sealed(json.dumps({"version": CHECKPOINT_VERSION, "kind": "checkpoint", "state": state}).encode())


def unsealed(data: bytes) -> Any:
    """Return the document before the line with its CRC32."""
    return json.loads(data.rpartition(b"\n#crc32 ")[0])


def sealed(body: bytes) -> bytes:
    """Return a document with the line with its CRC32."""
    return body + f"\n#crc32 {zlib.crc32(body):08x}\n".encode()


def journal(rng: Random, data: bytes) -> bytes:
    """Change, drop, double or exchange records of a journal."""
    payloads = [payload for payload in payloads_of(data) if payload.startswith(b"{")]
    place = rng.randrange(len(payloads))
    how = rng.randrange(10)
    if how == 0:
        payloads.insert(rng.randrange(len(payloads) + 1), payloads[place])
    elif how == 1:
        del payloads[place]
    elif how == 2:
        other = rng.randrange(len(payloads))
        payloads[place], payloads[other] = payloads[other], payloads[place]
    else:
        payloads[place] = _json(rng, json.loads(payloads[place]))
    return data[:12] + b"".join(map(journal_record, payloads))


def payloads_of(data: bytes) -> list[bytes]:
    """Return the payloads of a journal's records."""
    payloads, at = [], 12
    while at + 8 <= len(data):
        length = int.from_bytes(data[at : at + 4], "big")
        payloads.append(data[at + 8 : at + 8 + length])
        at += 8 + length
    return payloads


def journal_record(payload: bytes) -> bytes:
    length = struct.pack(">I", len(payload))
    return length + struct.pack(">I", zlib.crc32(length + payload)) + payload


def cursor(rng: Random, data: bytes) -> bytes:
    """Change the list in a cursor."""
    raw = base64.urlsafe_b64decode(data + b"=" * (-len(data) % 4))
    body = _json(rng, json.loads(raw[4:]))
    return base64.urlsafe_b64encode(struct.pack(">I", zlib.crc32(body)) + body).rstrip(b"=")


# arrays


def cells(rng: Random, table: Any) -> Any:
    """Return a changed copy of a structured array."""
    table = table.copy()
    for _ in range(rng.choice((1, 1, 2, 4))):
        if not len(table):
            return table
        row, other = rng.randrange(len(table)), rng.randrange(len(table))
        name = rng.choice(table.dtype.names)
        how = rng.randrange(8)
        if how < 4:
            kind = table.dtype[name]
            if kind.kind not in "iu":
                continue
            old = int(table[name][row])
            near = (old + 1, old - 1, old * 2, -old, 0, old + 32, old - 32, int(table[name][other]))
            value = rng.choice((*near, *INTEGERS[:-3]))
            low, size = -(2 ** (8 * kind.itemsize - 1)) if kind.kind == "i" else 0, 2 ** (8 * kind.itemsize)
            table[name][row] = low + (value - low) % size
        elif how == 4:
            table[[row, other]] = table[[other, row]]
        elif how == 5:
            table = np.delete(table, row)
        elif how == 6:
            table = np.insert(table, row, table[other])
        else:
            table[name] = table[name][::-1].copy() if rng.random() < 0.5 else table[name][row]
    return table


def compacted(rng: Random, data: bytes) -> bytes:
    """Change a part of a compacted file or shard, and correct the CRC32s of all parts and the lengths in the tail."""
    position, *lengths = _TAIL.unpack(data[-TAIL_SIZE:])[3:7]
    ends = np.cumsum([position, *lengths]).tolist()
    body, held, raw = bytearray(data[:position]), data[position : ends[1]], data[ends[1] : ends[2]]
    meta = json.loads(data[ends[2] : ends[3]])
    number, cut = struct.unpack_from(">II", raw)
    groups = np.frombuffer(raw, GROUP_DTYPE, number, 8).copy()
    blocks = np.frombuffer(raw, BLOCK_DTYPE, cut, 8 + groups.nbytes).copy()
    directory = ("groups", "groups", "blocks" if cut else "groups", "counts")
    part = rng.choice(("metadata", "metadata", *directory, "body", "filter", "tail"))
    if part == "groups":
        groups = cells(rng, groups)
    elif part == "blocks":
        blocks = cells(rng, blocks)
    elif part == "body":
        at = rng.choice((rng.randrange(HEADER_SIZE), rng.randrange(len(body)), rng.randrange(len(body))))
        body[at : at + 4] = struct.pack(">I", rng.choice(INTEGERS) % 2**32)[: len(body) - at]
        meta["header_crc32"] = zlib.crc32(body[:HEADER_SIZE])
        if "slot_map" not in meta:
            meta["slots_crc32"] = zlib.crc32(body[HEADER_SIZE : HEADER_SIZE + 8 * meta["layout"]["slots"]])
    elif part == "filter":
        other = (held + bytes(32), bytes(len(held)), b"\xff" * len(held))
        held = rng.choice((b"", held[:-1], held[:-32], *other, held[:33]))
    if part in ("groups", "blocks", "body"):
        for table in (groups, blocks):
            for run in table:
                run["crc32"] = zlib.crc32(body[int(run["offset"]) : int(run["offset"]) + int(run["length"])])
    counts = [len(groups), len(blocks)]
    if part == "counts":
        counts = [rng.choice((count, count + 1, 0, 2**32 - 1, 2**31)) for count in counts]
    directory = struct.pack(">II", *counts) + groups.tobytes() + blocks.tobytes()
    metadata = json.dumps(meta, separators=(",", ":"), sort_keys=True).encode()
    if part == "metadata":
        metadata = _json(rng, meta)
    if len(metadata) < lengths[2] and rng.random() < 0.9:
        metadata += b" " * (lengths[2] - len(metadata))
    behind = (held, directory, metadata)
    fields = [FORMAT_VERSION, 0, position, *map(len, behind), *map(zlib.crc32, behind)]
    if part == "tail":
        for _ in range(rng.choice((1, 2))):
            place = rng.randrange(2, 6)
            near = (fields[place] + 1, fields[place] - 1, fields[rng.randrange(2, 6)])
            fields[place] = rng.choice((*near, *INTEGERS)) % 2**64
    tail = _TAIL.pack(b"TIXTAIL\n", *fields, 0)[:-4]
    return bytes(body) + held + directory + metadata + tail + struct.pack(">I", zlib.crc32(tail))


def archived(rng: Random, data: bytes) -> bytes:
    """Change the table or the tail of an archived segment, or the segment and its sums."""
    shape = struct.Struct(">8sIIQQIIII")
    _, version, piece, start, size, crc32, _, zero, _ = shape.unpack(data[-48:])
    body, table = bytearray(data[:size]), data[size:-48]
    fields = [version, piece, start, size, crc32, zero]
    how = rng.randrange(4)
    if how == 0 and body:
        at = rng.randrange(len(body))
        body[at : at + 4] = struct.pack(">I", rng.choice(INTEGERS) % 2**32)[: len(body) - at]
        fields[4] = zlib.crc32(body)
        table = b"".join(struct.pack(">I", zlib.crc32(body[at : at + piece])) for at in range(0, len(body), piece))
    elif how == 1:
        table = rng.choice((table[:-4], table + table, bytes(len(table)), b"", table + b"\0"))
    else:
        place = rng.randrange(6)
        limit = 2**64 if place in (2, 3) else 2**32
        fields[place] = rng.choice((fields[place] + 1, fields[place] - 1, 0, *INTEGERS)) % limit
    version, piece, start, size, crc32, zero = fields
    tail = shape.pack(SEGMENT_MAGIC, version, piece, start, size, crc32, zlib.crc32(table), zero, 0)[:-4]
    return bytes(body) + table + tail + struct.pack(">I", zlib.crc32(tail))


def words(*positions: int, tail: bool = False) -> Reseal:
    """Return a function that overwrites words, for formats without checksums.

    It overwrites them at `positions` from the start (or from the end), or anywhere.
    """

    def change(rng: Random, data: bytes) -> bytes:
        changed = bytearray(data)
        for _ in range(rng.choice((1, 1, 2, 4))):
            if not changed:
                break
            at = rng.choice(positions) if positions and rng.random() < 0.7 else rng.randrange(len(changed))
            at = max(0, len(changed) - at if tail else at)
            size = rng.choice((1, 2, 4, 4, 8))
            old = int.from_bytes(changed[at : at + size], "big")
            value = rng.choice((old + 1, old - 1, old * 2, *INTEGERS)) % 2 ** (8 * size)
            changed[at : at + size] = value.to_bytes(size, "big")[: max(0, len(changed) - at)]
        if changed and rng.random() < 0.1:
            del changed[rng.randrange(len(changed)) :]
        return bytes(changed)

    return change
