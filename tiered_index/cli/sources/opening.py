"""Which kind of source a place holds, and the name under which the index keeps its position.

The name, `file:PATH#LENGTH-HASH`, holds the absolute path or URI and a fingerprint of the content: it tells the same
file, also one that has grown at its end, from another one at the same path. Positions count in the source's `unit`.
Where --column or --constant make other messages of it, ``/`` and a hash of what they say follow, so that the position
of the one is not that of the other.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterable
from typing import IO

from tiered_index.cli.sources.messages import Fields
from tiered_index.cli.sources.parquet import MAGIC, ParquetSource
from tiered_index.cli.sources.places import LocalFile, Place, Stdin
from tiered_index.cli.sources.text import GZIP_MAGIC, CsvSource, NdjsonSource
from tiered_index.errors import CorruptFile, InvalidArgument

_NAME = re.compile(r"file:(?P<path>.*)#(?P<length>[0-9]+)-(?P<hash>[0-9a-f]{16})(?P<fields>/[0-9a-f]{16})?", re.DOTALL)
_NDJSON_SUFFIXES = (".ndjson", ".jsonl", ".json", ".ndjson.gz", ".jsonl.gz", ".json.gz")
_CSV_SUFFIXES = (".csv", ".csv.gz")
_HEAD_BYTES = 4096


Source = NdjsonSource | CsvSource | ParquetSource


def open_source(place: Place, fields: Fields | None = None) -> Source:
    """Return the source at `place`, told by its first bytes. Raises `InvalidArgument`, `CorruptFile`."""
    if isinstance(place, LocalFile) and place.path.is_dir():
        raise InvalidArgument(f"{place} is a folder; give one NDJSON, CSV or Parquet file")
    name = str(place)
    with place.open() as handle:
        head = _head(place, handle)
    if head.startswith(MAGIC):
        if isinstance(place, Stdin):
            raise InvalidArgument("Parquet can't be read from stdin, whose end has to be read first: give a file")
        return ParquetSource(place, fields)
    if name.endswith(".parquet"):
        raise CorruptFile(name, "not a Parquet file", offset=0, expected=MAGIC, found=head[:4])
    if name.endswith(_CSV_SUFFIXES):
        return CsvSource(place, fields)
    if (
        not name.endswith(_NDJSON_SUFFIXES)
        and not head.lstrip().startswith(b"{")
        and (head or not isinstance(place, Stdin))
    ):
        if b"," in head.partition(b"\n")[0]:
            return CsvSource(place, fields)
        raise InvalidArgument(f"{place} is neither NDJSON nor CSV nor Parquet")
    return NdjsonSource(place, fields)


def _head(place: Place, handle: IO[bytes]) -> bytes:
    """Return the first bytes of the text, or of a Parquet file."""
    if isinstance(place, Stdin):
        return place.head()
    head = handle.read(_HEAD_BYTES)
    if not head.startswith(GZIP_MAGIC):
        return head
    handle.seek(0)
    try:
        return gzip.GzipFile(fileobj=handle).read(_HEAD_BYTES)
    except (EOFError, OSError, zlib.error) as error:
        raise CorruptFile(str(place), f"damaged gzip file: {error}") from error


def source_name(source: Source, known: Iterable[str], *, restart: bool) -> str | None:
    """Return the name of `source` in an index with the `known` ones; None for what can't be read again.

    Raises `InvalidArgument` where it changed.
    """
    if isinstance(source.place, Stdin):
        return None
    fields = source.fields.fingerprint()
    changed = same = False
    for name in known:
        match = _NAME.fullmatch(name)
        if match is None or match["path"] != str(source.place):
            continue
        length, found = source.fingerprint(int(match["length"]))
        if (length, found) != (int(match["length"]), match["hash"]):
            changed = True
        elif (match["fields"] or "") == fields:
            return name
        else:
            same = True
    if changed and not same and not restart:
        raise InvalidArgument(
            f"{source.place} is not the file that was taken before: its beginning differs. Give it another name, "
            "or take it from its start with --restart"
        )
    length, found = source.fingerprint(None)
    return f"file:{source.place}#{length}-{found}{fields}"
