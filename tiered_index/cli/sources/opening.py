"""From a path to a source, and from a source to the name under which the index keeps its position.

The name holds the absolute path and a fingerprint of the content: `file:PATH#LENGTH-HASH`. So the index itself, which keeps positions
durably and in the storage's log, can tell the same file (also one that has grown at its end) from another one at the same path.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterable
from pathlib import Path

from tiered_index.cli.sources.messages import Source
from tiered_index.cli.sources.ndjson import NdjsonSource
from tiered_index.cli.sources.parquet import MAGIC, ParquetSource
from tiered_index.errors import CorruptFile, InvalidArgument
from tiered_index.storage.disk import absolute_path

__all__ = ["open_source", "source_name"]

_NAME = re.compile(r"file:(?P<path>.*)#(?P<length>[0-9]+)-(?P<hash>[0-9a-f]{16})", re.DOTALL)
_NDJSON_SUFFIXES = (".ndjson", ".jsonl", ".json", ".ndjson.gz", ".jsonl.gz", ".json.gz")


def open_source(path: Path) -> Source:
    """Return the source at `path`, told by its first bytes. Raises `InvalidArgument`, `CorruptFile`."""
    path = absolute_path(path)
    if path.is_dir():
        raise InvalidArgument(f"{path} is a folder; give one NDJSON or Parquet file")
    try:
        with path.open("rb") as handle:
            head = handle.read(64)
    except OSError as error:
        raise InvalidArgument(f"{path}: {error.strerror}") from error
    if head.startswith(MAGIC):
        return ParquetSource(path)
    if path.name.endswith(".parquet"):
        raise CorruptFile(str(path), "not a Parquet file", offset=0, expected=MAGIC, found=head[:4])
    if not path.name.endswith(_NDJSON_SUFFIXES) and not _plain(path, head).lstrip().startswith(b"{"):
        raise InvalidArgument(f"{path} is neither NDJSON nor Parquet")
    return NdjsonSource(path)


def source_name(source: Source, known: Iterable[str], *, restart: bool) -> str:
    """Return the name of `source` in an index that has the `known` ones. Raises `InvalidArgument` where the file at this path changed.

    With `restart` a changed file is simply a new source.
    """
    candidates = []
    for name in known:
        match = _NAME.fullmatch(name)
        if match is None or match["path"] != str(source.path):
            continue
        length, found = source.fingerprint(int(match["length"]))
        if (length, found) == (int(match["length"]), match["hash"]):
            return name
        candidates.append(name)
    if candidates and not restart:
        raise InvalidArgument(
            f"{source.path} is not the file that was taken before: its beginning differs. Give it another name, "
            "or take it from its start with --restart"
        )
    length, found = source.fingerprint(None)
    return f"file:{source.path}#{length}-{found}"


def _plain(path: Path, head: bytes) -> bytes:
    if not head.startswith(b"\x1f\x8b"):
        return head
    try:
        with gzip.open(path, "rb") as handle:
            return handle.read(64)
    except (EOFError, OSError, zlib.error) as error:
        raise CorruptFile(str(path), f"damaged gzip file: {error}") from error
