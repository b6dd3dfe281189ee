"""Decodes the index keys of many messages from their properties, by NumPy and Arrow without a loop. Pure.

The result equals `layout.index_keys(parse_properties(java_text(...)))` of every message, with `tags` also the `tag_key`
of its tags. Memory: about 10 times the bytes of the properties.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tiered_index.connectors.rocketmq.log.layout import java_text

Int64 = npt.NDArray[np.int64]

_NAME_END, _VALUE_END, _SPACE = 1, 2, 32
_UNIQ_KEY = np.frombuffer(b"UNIQ_KEY", "<u8")[0]
_KEYS_AND_END = np.frombuffer(b"KEYS\x01\0\0\0", "<u8")[0]
_TAGS_AND_END = np.frombuffer(b"TAGS\x01\0\0\0", "<u8")[0]
_FIVE_BYTES = np.uint64((1 << 40) - 1)
# Up to so many keys of one message are compared pairwise by NumPy; the rare messages with more use a dict
_FEW = 8


@dataclass(frozen=True, slots=True)
class KeyColumns:
    """n keys (large_string), the index of each key's `message` (i64, n, ascending), and the count of `replaced` keys.

    Replaced keys were not UTF-8.
    """

    message: Int64
    keys: Any
    replaced: int


def spans(data: Any, starts: Int64, ends: Int64) -> Any:
    """Return the bytes [starts[i], ends[i]) of a buffer (i64, n each) as one large_binary array (n).

    The ranges are ascending and don't overlap. Offsets that alternate between starts and ends describe, without a copy,
    an array whose odd elements are the ranges: `take` gathers them.
    """
    count = len(starts)
    offsets = np.empty(2 * count + 1, np.int64)
    offsets[0] = 0
    offsets[1::2], offsets[2::2] = starts, ends
    everything = pa.Array.from_buffers(pa.large_binary(), 2 * count, [None, pa.py_buffer(offsets), pa.py_buffer(data)])
    return everything.take(pa.array(np.arange(1, 2 * count, 2)))


def key_columns(data: Any, starts: Int64, ends: Int64, *, tags: bool = False) -> KeyColumns:
    """Return the keys of messages with properties [starts[i], ends[i]) of `data` (i64, n each; ascending, disjoint).

    With `tags` the `tag_key` of each message's tags is one of them.
    """
    # Copy each message's properties and the next byte, which becomes a value end: then every piece is between two value
    # ends and belongs to one message. Only the last message of the data may have no next byte. With the zeros at the
    # end, every position can be read as a word.
    if not len(starts):
        return KeyColumns(np.zeros(0, np.int64), pa.array([], pa.large_string()), 0)
    with_mark = np.minimum(ends + 1, len(data))
    _, offsets_buffer, stored = spans(data, starts, with_mark).buffers()
    offsets = np.frombuffer(offsets_buffer, np.int64)[: len(starts) + 1]
    begins, total = offsets[:-1], int(offsets[-1])
    text = np.zeros(total + 24, np.uint8)
    if total:
        text[:total] = np.frombuffer(stored, np.uint8)[:total]
    text[offsets[1:-1] - 1] = _VALUE_END
    text[total - 1 if with_mark[-1] > ends[-1] else total] = _VALUE_END
    words = np.ndarray((len(text) - 7,), "<u8", text, strides=(1,))
    ends_at = np.flatnonzero(text == _VALUE_END)
    piece_at = np.empty_like(ends_at)
    if len(ends_at):
        piece_at[0], piece_at[1:] = 0, ends_at[:-1] + 1
    first = words[piece_at]
    name_end = text[np.minimum(piece_at + 8, len(text) - 1)]
    uniq = np.flatnonzero((first == _UNIQ_KEY) & (name_end == _NAME_END) & (ends_at > piece_at + 9))
    keys = np.flatnonzero(((first & _FIVE_BYTES) == _KEYS_AND_END) & (ends_at > piece_at + 5))
    uniq_message, uniq = _last_of_each(begins, piece_at, uniq)
    keys_message, keys = _last_of_each(begins, piece_at, keys)
    token_message, token_starts, token_ends = _split(
        text, ends_at, keys_message, keys, piece_at[keys] + 5, ends_at[keys]
    )
    message = [uniq_message, token_message]
    starts_at, stops_at = [piece_at[uniq] + 9, token_starts], [ends_at[uniq], token_ends]
    if tags:
        tagged = np.flatnonzero(((first & _FIVE_BYTES) == _TAGS_AND_END) & (ends_at > piece_at + 5))
        tag_message, tagged = _last_of_each(begins, piece_at, tagged)
        # "TAGS", the name's end and the tags become "TAGT#" and the tags
        text[piece_at[tagged] + 3], text[piece_at[tagged] + 4] = ord("T"), ord("#")
        message.append(tag_message)
        starts_at.append(piece_at[tagged] + 3)
        stops_at.append(ends_at[tagged])
    starts, stops = np.concatenate(starts_at), np.concatenate(stops_at)
    # A stable sort merges ascending runs. The order by position is also the order by message.
    order = np.argsort(starts, kind="stable")
    return _texts(text, words, np.concatenate(message)[order], starts[order], stops[order])


def _last_of_each(begins: Int64, piece_at: Int64, pieces: Int64) -> tuple[Int64, Int64]:
    """Return the last of `pieces` of each message: the message indices, and the pieces."""
    message = np.searchsorted(begins, piece_at[pieces], "right") - 1
    last = np.ones(len(pieces), np.bool_)
    last[:-1] = message[1:] != message[:-1]
    return message[last], pieces[last]


def _split(
    text: npt.NDArray[np.uint8], ends_at: Int64, message: Int64, keys: Int64, starts: Int64, stops: Int64
) -> tuple[Int64, Int64, Int64]:
    """Cut the values [starts, stops) of `keys` at spaces; return message, start and stop of the parts not empty."""
    spaces = np.flatnonzero(text == _SPACE)
    if not len(spaces) or not len(keys):
        return message, starts, stops
    value = np.searchsorted(starts, spaces, "right") - 1
    inside = (value >= 0) & (spaces < stops[value])
    spaces = spaces[inside]
    # starts and stops of all parts, ascending: the parts don't overlap, so the i-th start belongs to the i-th stop
    part_starts = np.sort(np.concatenate([starts, spaces + 1]), kind="stable")
    part_stops = np.sort(np.concatenate([stops, spaces]), kind="stable")
    whole = part_stops > part_starts
    part_starts, part_stops = part_starts[whole], part_stops[whole]
    return message[np.searchsorted(starts, part_starts, "right") - 1], part_starts, part_stops


def _texts(
    text: npt.NDArray[np.uint8], words: npt.NDArray[np.uint64], message: Int64, starts: Int64, stops: Int64
) -> KeyColumns:
    """Return the keys [starts, stops) of `text`, each key of a message once."""
    keep = _firsts(text, words, message, starts, stops)
    if keep is not None:
        message, starts, stops = message[keep], starts[keep], stops[keep]
    binary = spans(text, starts, stops)
    try:
        return KeyColumns(message, binary.cast(pa.large_string()), 0)
    except pa.ArrowInvalid:  # a key is not UTF-8: different bytes may become the same text
        raw = binary.to_pylist()
        texts = [java_text(key) for key in raw]
        once = dict.fromkeys(zip(message.tolist(), texts, strict=True))
        replaced = sum(key != text.encode() for key, text in zip(raw, texts, strict=True))
        return KeyColumns(
            np.array([m for m, _ in once], np.int64), pa.array([t for _, t in once], pa.large_string()), replaced
        )


def _firsts(
    text: npt.NDArray[np.uint8], words: npt.NDArray[np.uint64], message: Int64, starts: Int64, stops: Int64
) -> npt.NDArray[np.bool_] | None:
    """Return which keys are the first of their text in their message, or None for all."""
    count = len(message)
    if count < 2 or not (message[1:] == message[:-1]).any():
        return None
    lengths = stops - starts
    # first and last 8 bytes, cut to the key; keys of up to 16 bytes differ in them or in their length
    unused = (np.uint64(8) - np.minimum(lengths, 8).astype(np.uint64)) * np.uint64(8)
    mask = np.uint64(0xFFFFFFFFFFFFFFFF) >> unused
    head = words[starts] & mask
    tail = words[np.maximum(stops - 8, starts)] & mask
    keep = np.ones(count, np.bool_)
    firsts = np.flatnonzero(np.append(True, message[1:] != message[:-1]))
    sizes = np.diff(np.append(firsts, count))
    for lag in range(1, min(int(sizes.max()), _FEW)):
        same = np.flatnonzero(
            (message[lag:] == message[:-lag])
            & (lengths[lag:] == lengths[:-lag])
            & (head[lag:] == head[:-lag])
            & (tail[lag:] == tail[:-lag])
        )
        for i in same.tolist():
            j = i + lag
            if lengths[i] <= 16 or text[starts[i] : stops[i]].tobytes() == text[starts[j] : stops[j]].tobytes():
                keep[j] = False
    for group in np.flatnonzero(sizes > _FEW).tolist():
        seen: dict[bytes, int] = {}
        for i in range(int(firsts[group]), int(firsts[group] + sizes[group])):
            keep[i] = seen.setdefault(text[starts[i] : stops[i]].tobytes(), i) == i
    return keep
