"""`tiered-index ingest FILE` for a file that `export` wrote: puts its entries into an index, with their hashes of keys.

The index stores the number of durable rows with the entries. If the command is killed and run again, it puts only the
missing rows. One thread in addition to the index's own; memory: a batch.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, get_args

import pyarrow as pa

from tiered_index.base.documents import decoder_of
from tiered_index.cli.output import human_count
from tiered_index.cli.session import Session
from tiered_index.cli.write.export import PLACE_COLUMNS
from tiered_index.cli.write.options import IngestOptions
from tiered_index.cli.write.putting import Putting, show_put
from tiered_index.config import OffsetSpace
from tiered_index.connectors.files.rows.batch import RowFile
from tiered_index.connectors.files.rows.parquet import DAMAGE
from tiered_index.connectors.files.rows.places import Place, Stdin
from tiered_index.connectors.files.rows.table import ColumnsFile
from tiered_index.connectors.files.rows.text import NdjsonFile
from tiered_index.connectors.follow import PatientPut
from tiered_index.errors import ConfigError, CorruptFile, InvalidArgument, UnsupportedVersion
from tiered_index.format.keys.hashing import HashRule
from tiered_index.format.layout import Layout
from tiered_index.format.schema import KEYED_SCHEMA, ROCKETMQ_SCHEMA, Schema
from tiered_index.service.read.export import EXPORT_VERSION, METADATA, entries_checksum, export_schema
from tiered_index.service.root import Root
from tiered_index.storage.disk import Disk

_ROWS = 1 << 17
_TAIL_BYTES = 1 << 20


@dataclass(frozen=True)
class ExportedFile:
    """A file that `export` wrote. `about` is its metadata, None for NDJSON."""

    file: NdjsonFile | ColumnsFile
    columns: frozenset[str]
    about: dict[str, Any] | None

    @classmethod
    def of(cls, file: RowFile) -> ExportedFile | None:
        """Return a file of rows as an export; None: `export` did not write it.

        Raises `InvalidArgument`, `CorruptFile`.
        """
        if isinstance(file, ColumnsFile):
            try:
                return cls._of_columns(file)
            except (InvalidArgument, UnsupportedVersion):
                raise
            except (*DAMAGE, ConfigError, ValueError, TypeError, LookupError) as error:
                raise CorruptFile(str(file.file), f"can't be read: {error}") from error
        if isinstance(file, NdjsonFile):
            names = frozenset[str]()
            with contextlib.suppress(InvalidArgument):
                names = frozenset(file.first_row())
            # a line of a message has a key
            if "key_hash" in names and not names & {"key", "keys"}:
                return cls(file, names, None)
        return None

    @classmethod
    def _of_columns(cls, file: ColumnsFile) -> ExportedFile | None:
        schema = file.table.schema
        names = frozenset(schema.names)
        if METADATA not in (schema.metadata or {}):
            if "key_hash" in names and "fingerprint" not in names:
                raise InvalidArgument(
                    f"{file.file} has hashes of keys without fingerprints, like a table that Spark wrote: export its "
                    f"index with `tiered-index export`, and ingest that file"
                )
            return None
        about = decoder_of(dict[str, Any]).decode(schema.metadata[METADATA])
        UnsupportedVersion.unless_read(str(file.file), "export", EXPORT_VERSION, about.get("version"))
        if about["offset_space"] not in get_args(OffsetSpace):
            raise ValueError(f"metadata name the offset space {about['offset_space']!r:.80}")
        Layout.from_json(about["layout"])
        return cls(file, names, about)

    @property
    def place(self) -> Place:
        """Where the file is."""
        return self.file.file

    @property
    def rows(self) -> int | None:
        """The number of rows; None: not known."""
        return self.file.table.rows if isinstance(self.file, ColumnsFile) else None

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
                    f"with such an index, or export as parquet"
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
        hint = "" if self.about else "; NDJSON does not state its schema: give --preset, or export as parquet"
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
        if isinstance(self.file, NdjsonFile):
            yield from self._of_lines(self.file, wanted)
            return
        try:
            for _, rows in self.file.table.read(wanted.names):
                yield from rows.select(wanted.names).cast(wanted).combine_chunks().to_batches()
        except DAMAGE as error:
            raise CorruptFile(str(self.place), f"can't be read: {error}") from error

    def _of_lines(self, file: NdjsonFile, wanted: Any) -> Iterator[pa.RecordBatch]:
        packed = [field.name for field in wanted if pa.types.is_binary(field.type)]
        lines = file.rows()
        while part := list(islice(lines, _ROWS)):
            rows = [row for _, row in part]
            try:
                for name in packed:
                    for row in rows:
                        row[name] = bytes.fromhex(row[name])
                yield pa.RecordBatch.from_pylist(rows, wanted)
            except (pa.ArrowException, KeyError, TypeError, ValueError, OverflowError) as error:
                raise InvalidArgument(f"{self.place}, up to {part[-1][0]}: {error}") from error


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
        put, rows, entries, checksum = putting.patient(is_outside=True), 0, 0, 0
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
