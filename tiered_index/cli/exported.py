"""`tiered-index ingest FILE` for a file that `export` wrote: puts its entries into an index, with their hashes of keys.

The index stores the number of durable rows with the entries. If the command is killed and run again, it puts only the
missing rows. One thread in addition to the index's own; memory: a batch.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any, Literal, cast, get_args

import pyarrow as pa

from tiered_index.cli.export import PLACE_COLUMNS
from tiered_index.cli.ingesting import IngestOptions
from tiered_index.cli.output import human_count
from tiered_index.cli.putting import Putting, show_put
from tiered_index.cli.session import Session
from tiered_index.config import OffsetSpace
from tiered_index.errors import ConfigError, CorruptFile, InvalidArgument
from tiered_index.follow import PatientPut
from tiered_index.format.hashing import HashRule
from tiered_index.format.layout import Layout
from tiered_index.format.schema import KEYED_SCHEMA, ROCKETMQ_SCHEMA, Schema
from tiered_index.service.read.export import METADATA, entries_checksum, export_schema
from tiered_index.service.root import Root
from tiered_index.sources.columns import bounded_lines
from tiered_index.sources.messages import json_object
from tiered_index.sources.parquet import DAMAGE, ParquetTable
from tiered_index.sources.places import LocalFile, Place, Stdin, StoredFile
from tiered_index.storage.disk import Disk

_GZIP_MAGIC = b"\x1f\x8b"
_ROWS = 1 << 17
_TAIL_BYTES = 1 << 20


@dataclass(frozen=True)
class ExportedFile:
    """A file that `export` wrote. `about` is its metadata, None for NDJSON."""

    place: Place
    kind: Literal["parquet", "arrow", "ndjson"]
    rows: int | None
    columns: frozenset[str]
    about: dict[str, Any] | None

    @classmethod
    def at(cls, place: Place) -> ExportedFile | None:
        """Return the file at a place; None: `export` did not write it. stdin is NDJSON.

        Raises `InvalidArgument`, `CorruptFile`.
        """
        if isinstance(place, Stdin):
            is_json = place.head()[:1] == b"{"
            return cls._of_line(place, next(bounded_lines(place.first_line, f"{place}, ")) if is_json else b"")
        with _unzipped(place) as handle:
            head = handle.read(8)
            handle.seek(0)
            line = next(bounded_lines(handle.readline, f"{place}, ")) if head[:1] == b"{" else b""
        try:
            if head.startswith(b"PAR1"):
                table = ParquetTable(place)
                return cls._exported(place, "parquet", table.rows, table.schema)
            if head.startswith(b"ARROW1"):
                with place.ranges() as handle, pa.ipc.open_file(handle) as arrow:
                    rows = sum(arrow.get_batch(number).num_rows for number in range(arrow.num_record_batches))
                    return cls._exported(place, "arrow", rows, arrow.schema)
        except InvalidArgument:
            raise
        except (*DAMAGE, ConfigError, ValueError, TypeError, LookupError) as error:
            raise CorruptFile(str(place), f"can't be read: {error}") from error
        return cls._of_line(place, line)

    @classmethod
    def _of_line(cls, place: Place, line: bytes) -> ExportedFile | None:
        with contextlib.suppress(InvalidArgument):
            names = frozenset(json_object(line, f"{place}, line 1: ")) if line else frozenset[str]()
            # a line of a message has a key
            if "key_hash" in names and not names & {"key", "keys"}:
                return cls(place, "ndjson", None, names, None)
        return None

    @classmethod
    def _exported(cls, place: LocalFile | StoredFile, kind: Any, rows: int, schema: Any) -> ExportedFile | None:
        names = frozenset(schema.names)
        if METADATA not in (schema.metadata or {}):
            if "key_hash" in names and "fingerprint" not in names:
                raise InvalidArgument(
                    f"{place} has hashes of keys without fingerprints, like a table that Spark wrote: export its "
                    f"index with `tiered-index export`, and ingest that file"
                )
            return None
        about = json.loads(schema.metadata[METADATA])
        if about["offset_space"] not in get_args(OffsetSpace):
            raise ValueError(f"metadata name the offset space {about['offset_space']!r:.80}")
        Layout.from_json(about["layout"])
        return cls(place, kind, rows, names, about)

    def settings(self, preset: str | None, rule: HashRule | None, root: Path | None) -> dict[str, Any]:
        """Return the settings of an index for the entries; `preset` and `rule` are the options for NDJSON.

        Raises `InvalidArgument` if they are missing, or if no index can find the keys.
        """
        if self.about is not None:
            if preset or rule:
                raise InvalidArgument(f"{'--preset' if preset else '--hash'} is for NDJSON; this file states its own")
            layout = Layout.from_json(self.about["layout"])
            preset, rule = layout.preset.name, layout.hash
            more = {"item_type": layout.schema.item_type(), "offset_space": self.about["offset_space"]}
        else:
            more = {}
            if rule is not None and preset != "rocketmq":
                raise InvalidArgument("--hash is for entries of preset rocketmq: give --preset rocketmq, too")
            if preset == "rocketmq" and rule is None:
                raise InvalidArgument("NDJSON does not state the hash rule of its keys: give --hash")
            is_known = root is not None and Root(root, Disk()).read_marker() is not None
            if (
                preset is None
                and not is_known
                and self.columns - PLACE_COLUMNS.keys() != frozenset(export_schema(KEYED_SCHEMA).names)
            ):
                raise InvalidArgument(
                    f"{self.place} does not state the schema of its entries: give --preset rocketmq or a root "
                    f"with such an index, or export as parquet or arrow"
                )
        if rule == "both":
            raise InvalidArgument(
                f"{self.place}: its entries use both hash rules, but an index supports one: export ranges whose files "
                "use one rule"
            )
        return {"preset": preset, "hash": rule if preset == "rocketmq" else None, **more}

    def check(self, schema: Schema, rule: HashRule | None) -> None:
        """Raise `InvalidArgument` if the file has other columns than exported entries of `schema`.

        Also if the hash rule is unknown and the schema allows two.
        """
        wanted = frozenset(export_schema(schema).names)
        if self.columns == wanted or self.columns == wanted | PLACE_COLUMNS.keys():
            if self.about is None and rule is None and schema == ROCKETMQ_SCHEMA:
                raise InvalidArgument(
                    f"{self.place} does not state the hash rule of its keys: give --preset and --hash"
                )
            return
        lacks, more = sorted(wanted - self.columns), sorted(self.columns - wanted)
        problem = f"lacks column {lacks[0]!r}" if lacks else f"has an unknown column {more[0]!r}"
        hint = "" if self.about else "; NDJSON does not state its schema: give --preset, or export as parquet or arrow"
        raise InvalidArgument(f"{self.place} {problem}: the entries of this index are of schema {schema.name}{hint}")

    def name(self) -> str | None:
        """Return the source name of the file in an index: place, size and a hash of the end; None for stdin."""
        if isinstance(self.place, Stdin):
            return None
        with self.place.ranges() as handle:
            size = handle.seek(0, io.SEEK_END)
            handle.seek(max(0, size - _TAIL_BYTES))
            return f"export:{self.place}#{size}-{hashlib.sha256(handle.read(_TAIL_BYTES)).hexdigest()[:16]}"

    def batches(self, schema: Schema) -> Iterator[pa.RecordBatch]:
        """Yield the rows as batches of `export_schema`; the batches are the same each time. Raises `CorruptFile`."""
        wanted = export_schema(schema)
        try:
            if self.kind == "ndjson":
                with _unzipped(self.place) as handle:
                    yield from self._of_lines(handle, wanted)
                return
            assert not isinstance(self.place, Stdin)
            if self.kind == "parquet":
                for _, rows in ParquetTable(self.place).read(wanted.names):
                    yield from rows.cast(wanted).combine_chunks().to_batches()
            else:
                with self.place.ranges() as handle, pa.ipc.open_file(handle) as arrow:
                    for number in range(arrow.num_record_batches):
                        batch = arrow.get_batch(number)
                        batch.validate(full=True)
                        yield batch.select(wanted.names).cast(wanted)
        except DAMAGE as error:
            raise CorruptFile(str(self.place), f"can't be read: {error}") from error

    def _of_lines(self, handle: IO[bytes], wanted: Any) -> Iterator[pa.RecordBatch]:
        packed = [field.name for field in wanted if pa.types.is_binary(field.type)]
        number = 0
        lines = bounded_lines(handle.readline, f"{self.place}, ")
        while part := list(islice(lines, _ROWS)):
            rows = [json_object(line, f"{self.place}, line {at:,}: ") for at, line in enumerate(part, number + 1)]
            number += len(part)
            try:
                for name in packed:
                    for row in rows:
                        row[name] = bytes.fromhex(row[name])
                yield pa.RecordBatch.from_pylist(rows, wanted)
            except (pa.ArrowException, KeyError, TypeError, ValueError, OverflowError) as error:
                raise InvalidArgument(f"{self.place}, before line {number + 1:,}: {error}") from error


@contextlib.contextmanager
def _unzipped(place: Place) -> Iterator[IO[bytes]]:
    """Open a file, gzipped or not, for reading. Raises `CorruptFile` in the block for a damaged gzip file."""
    with place.open() as handle:
        is_gzipped = False
        if not isinstance(place, Stdin):
            is_gzipped = handle.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
            handle.seek(0)
        try:
            yield cast(IO[bytes], gzip.GzipFile(fileobj=handle)) if is_gzipped else handle
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise CorruptFile(str(place), f"damaged gzip file: {error}") from error


def _put(put: PatientPut, batch: pa.RecordBatch, name: str | None, rows: int) -> int:
    """Put rows with their topic ids; if the index uses one of them for another topic, let it assign its own ids."""
    source = name, rows if name is not None else None
    try:
        return put(batch, *source)
    except InvalidArgument:
        try:
            return put(batch.select([column for column in batch.schema.names if column != "topic_id"]), *source)
        except InvalidArgument as error:
            place = name.partition("#")[0] if name is not None else "stdin"
            raise InvalidArgument(f"{place}, before row {rows + 1:,}: {error}") from error


def ingest_exported(session: Session, file: ExportedFile, options: IngestOptions) -> int:
    """Put the entries of an exported file into an index, and return the exit code.

    Lookups in the new index give the same answers as in the exported one, since entries keep the hashes of their keys.
    """
    run, rule = options.run, options.run.hash_rule
    of_file = file.settings(run.preset, rule, session.config().root)
    config = session.config(**vars(options.geometry) | of_file)
    with Putting.open(session, config, options.intake) as putting:
        index = putting.index
        file.check(index.schema, rule)
        name = file.name()
        start = 0 if run.restart or name is None else index.durable_position(name) or 0
        put, rows, entries, checksum = putting.patient(), 0, 0, 0
        with putting.progress("ingesting", file.rows) as progress:
            for batch in file.batches(index.schema):
                begin, rows = rows, rows + len(batch)
                checksum += entries_checksum(batch, index.schema)
                if rows > start:
                    entries += _put(put, batch.slice(max(0, start - begin)), name, rows)
                progress.update(rows, f"{human_count(rows)} entries")
        putting.settle()
        document = putting.document(
            status="complete",
            source=str(file.place),
            source_name=name,
            rows=rows,
            checksum=f"{checksum % 2**64:016x}",
            resumed_from=start,
            entries=entries,
            not_taken=["positions", "tombstones", "horizons"],
        )
    show_put(session.out, document)
    session.out.remark("an export has no source positions, tombstones and horizons; `copy` copies them")
    return 0
