"""The text of bzip2 and xz, from the start of a file.

The standard library's own readers ignore damage in a stream after the first one, and lose the text before damage. A
damaged block of bzip2, and a damaged chunk of xz, are found at their end, so their text is held back until then. One
thread uses a text.
"""

from __future__ import annotations

import bz2
import contextlib
import lzma
from collections import deque
from collections.abc import Callable, Iterator
from typing import IO, Any

# most text that a decompressor gives at a time, and packed bytes that are read at a time
_PIECE_TEXT_BYTES = 1 << 20
_PIECE_BYTES = 16 << 10
_MAGICS = {"bzip2": b"BZh", "xz": b"\xfd7zXZ\0"}
_ERRORS = OSError, lzma.LZMAError
# most bytes of a chunk of xz with its header; most text of a chunk, and of a block of bzip2: 255 for each five bytes
_CHUNK_BYTES = (64 << 10) + 6
_MOST_TEXT_BYTES = {"bzip2": 900_000 // 5 * 255, "xz": 2 << 20}
# `xz -9` has 64 MiB
_MOST_DICTIONARY_BYTES = 128 << 20


class StreamedText:
    """The text of a file of any number of streams of bzip2 or xz, from its start.

    Bytes after the last stream that begin no other one are ignored, as by the programs. Raises `EOFError`, `OSError`
    and `LZMAError` for damage, after the text before it. Of xz the text of some 64 KiB of the file before the damage
    may be missing. Memory: some MiB, 46 MiB for a text that is nearly all zeros, and what the library needs.
    """

    def __init__(self, raw: IO[bytes], compression: str) -> None:
        self._raw, self._taken = raw, raw.tell()
        self._make: Callable[[], Any] = bz2.BZ2Decompressor if compression == "bzip2" else _xz_unpacker
        self._magic, self._is_xz = _MAGICS[compression], compression == "xz"
        # texts that may be of a damaged block or chunk, each with the place in the file after its bytes
        self._held, self._held_bytes = deque[tuple[int, bytes]](), 0
        self._most_held_bytes = _MOST_TEXT_BYTES[compression]
        self._texts = self._of_streams()
        self._ready, self._at = b"", 0

    def read(self, size: int) -> bytes:
        """Return the next bytes of the text, at most `size`; empty at its end."""
        if self._at == len(self._ready):
            self._ready, self._at = next(self._texts, b""), 0
        data = self._ready[self._at : self._at + size]
        self._at += len(data)
        return data

    def _of_streams(self) -> Iterator[bytes]:
        unpacker: Any = None
        # the place of the present stream in the file, its first bytes, and the bytes of its text and of all text
        begin, head, of_stream, of_all = 0, b"", 0, 0
        while data := self._raw.read(_PIECE_BYTES):
            self._taken += len(data)
            while data:
                if unpacker is None:
                    if not (data := data.lstrip(b"\0")):
                        break
                    unpacker, begin, head, of_stream = self._make(), self._taken - len(data), b"", 0
                head = (head + data[: len(self._magic)])[: len(self._magic)]
                try:
                    for text in _texts_of(unpacker, data):
                        of_stream, of_all = of_stream + len(text), of_all + len(text)
                        self._held.append((self._taken, text))
                        self._held_bytes += len(text)
                        yield from self._released(is_whole=False)
                except _ERRORS as error:
                    if "emory" in str(error):
                        most = f"{_MOST_DICTIONARY_BYTES >> 20} MiB"
                        raise lzma.LZMAError(
                            f"its dictionary has more than {most}: pack it again by `xz -9`"
                        ) from error
                    if of_all and head != self._magic:
                        return
                    if not self._is_xz:
                        yield from self._before_damage(begin, len(data), of_stream - self._held_bytes)
                    raise
                # a block of bzip2 has given all its text only if it has the right checksum
                yield from self._released(is_whole=not self._is_xz or unpacker.eof)
                if not unpacker.eof:
                    break
                data, unpacker = unpacker.unused_data, None
        yield from self._released(is_whole=True)
        if unpacker is not None:
            raise EOFError("it is cut off")

    def _released(self, *, is_whole: bool) -> Iterator[bytes]:
        """Yield the held texts; unless `is_whole`, only those of blocks or chunks before the last one."""
        while self._held:
            at, text = self._held[0]
            is_earlier = self._is_xz and self._taken - at > _CHUNK_BYTES
            if not (is_whole or is_earlier or self._held_bytes - len(text) >= self._most_held_bytes):
                return
            self._held.popleft()
            self._held_bytes -= len(text)
            yield text

    def _before_damage(self, begin: int, size: int, yielded_bytes: int) -> Iterator[bytes]:
        """Yield the text of a stream after its first `yielded_bytes`, up to damage in the last `size` bytes read.

        The call of the library that finds damage gives no text, so those bytes are given to it one by one.
        """
        again, left = self._make(), self._taken - size - begin
        self._raw.seek(begin)
        whole = (self._raw.read(min(_PIECE_BYTES, left - at)) for at in range(0, left, _PIECE_BYTES))
        single = (self._raw.read(1) for _ in range(size))
        with contextlib.suppress(*_ERRORS):
            for data in whole:
                yielded_bytes -= sum(map(len, _texts_of(again, data)))
            for data in single:
                # joined, because the damage of a block is found at its end
                text = b"".join(_texts_of(again, data))
                if len(text) > yielded_bytes:
                    yield text[yielded_bytes:]
                yielded_bytes -= min(yielded_bytes, len(text))


def _texts_of(unpacker: Any, data: bytes) -> Iterator[bytes]:
    """Yield the text of the next bytes of a stream, all that the decompressor has."""
    while not unpacker.eof:
        text = bytes(unpacker.decompress(data, _PIECE_TEXT_BYTES))
        if not (text or data):
            return
        data = b""
        if text:
            yield text


def _xz_unpacker() -> lzma.LZMADecompressor:
    # beside its dictionary it needs little
    return lzma.LZMADecompressor(memlimit=_MOST_DICTIONARY_BYTES + (8 << 20))
