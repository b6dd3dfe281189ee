"""Checks files and a mapping before they are indexed: a mistyped path or field must not make an index.

A field may be in newer files only, or begin in a later row. So the heads of some files are looked at first, and all
rows only if a field is in none of them. Memory: some blocks of a file. One thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from tiered_index.config import IndexConfig
from tiered_index.connectors.contract import SourceRun
from tiered_index.connectors.documents import key_rules, of_store
from tiered_index.connectors.files.listing import HEAD_BYTES, SourceFile, Unlisted, listed_files
from tiered_index.connectors.files.rows.batch import UNREADABLE, RowFile
from tiered_index.connectors.files.rows.columns import MAX_ROW_BYTES
from tiered_index.connectors.files.rows.forms import open_rows
from tiered_index.connectors.files.rows.mapping import TOPIC_FIELD, Dialect, RowMapping, no_key
from tiered_index.connectors.files.rows.places import STDIN
from tiered_index.connectors.files.rows.table import ColumnsFile
from tiered_index.connectors.files.rows.text import TextFile, too_long
from tiered_index.connectors.files.rows.values import key_value
from tiered_index.connectors.files.rows.zone import TimeZone
from tiered_index.connectors.files.spec import DEFAULT_TIME, FilesOptions, RowOptions
from tiered_index.connectors.files.table_folders import check_outside_tables
from tiered_index.connectors.json_paths import key_texts
from tiered_index.errors import ConfigError, InvalidArgument, TieredIndexError
from tiered_index.errors import listed as listed_names
from tiered_index.format.names import TOPICS_QUEUE, linked_store
from tiered_index.service.read.segments.places import FILES_QUEUE
from tiered_index.service.reader import IndexReader

_MOST_HEADS = 64
# also of a packed text, whose length nobody knows
_TO_THE_END = 1 << 62


def first_problem(file: SourceFile, mapping: RowMapping) -> str | None:
    """Return why the first rows of a file are no entries; None: one of them is. Raises as a reading of the file."""
    # unclear times are not counted
    mapping = replace(mapping, zone=None)
    rows = open_rows(file.file, file.size_bytes, file.head(), mapping.dialect)
    for batch in rows.reading(mapping, 0, rows.length_bound(0)).batches(0):
        if batch.rows:
            return None
        if batch.bad:
            return f"{batch.bad[0].where}: {batch.bad[0].problem}"
    return None


class FieldSearch:
    """Which fields of a mapping rows have, and whether one of them is an entry. It does not change the mapping.

    - `missing` are option and path of the fields that no row has, as `RowMapping.names`.
    - `first` are the URI and the fields of the first file that has rows; None: no file has any.
    - `error` is that of the first file that can't be read; None: all can.
    - `has_entry`: a row is an entry.
    - `is_cut`: there are rows that were not looked at.
    """

    def __init__(self, mapping: RowMapping) -> None:
        # the unit of times is not decided yet, and unclear times are not counted
        self._mapping = replace(mapping, zone=None)
        self.missing = [*mapping.names]
        self.first: tuple[str, list[str]] | None = None
        self.error: TieredIndexError | None = None
        self._problem: str | None = None
        self.is_cut = False
        self._hints: dict[tuple[str, str], InvalidArgument] = {}
        self.has_entry = False

    @property
    def is_over(self) -> bool:
        """Whether all fields were found, and a row that is an entry."""
        return self.has_entry and not self.missing

    def misses(self, known: Collection[str], *, keys_may_come: bool) -> bool:
        """Return whether the run must not begin yet. `known` are the keys of the log; empty: it has no files yet.

        A known key may be in earlier files, and others may come. Rows of a log that has some are named one by one.
        """
        keys = {
            key for key, field in zip(self._mapping.keys, self._mapping.names, strict=False) if field in self.missing
        }
        if known:
            return not keys <= {*known} and not keys_may_come
        # a file may have a header and no row yet
        is_bad = self._problem is not None and not self.has_entry
        return is_bad or len(self.missing) > (len(keys) if keys_may_come else 0)

    def look_at_heads(self, files: Sequence[SourceFile]) -> None:
        """Look at the first rows of files, of at most 64: the first and the last one, and others between them."""
        self.is_cut = len(files) > _MOST_HEADS
        for file in _spread(files):
            if self.is_over:
                break
            self._look(file, whole=False)

    def look_at_all(self, files: Sequence[SourceFile]) -> None:
        """Look at all rows of files, up to the one that has what is missing."""
        for file in files:
            if self.is_over:
                break
            self._look(file, whole=True)

    def failure(self, count: int) -> InvalidArgument:
        """Return the error for `count` files, in whose rows something is missing."""
        assert self.first is not None
        for field in self.missing:
            if field in self._hints:
                return self._hints[field]
        uri, fields = self.first
        if self._problem is not None and (not self.missing or self.missing == self._mapping.names):
            return InvalidArgument(f"{self._problem}. No row of {_of_files(count, uri)} is an entry")
        there = "the first one" if count == 1 else f"the first one of {uri}"
        return InvalidArgument(
            f"no row of {_of_files(count, uri)} has {self._mapping.shown(self.missing)}; {there} has "
            f"{listed_names(fields, 30)}"
        )

    def _look(self, file: SourceFile, *, whole: bool) -> None:
        try:
            rows = open_rows(file.file, file.size_bytes, file.head(), self._mapping.dialect)
            if not rows.length_bound(0):
                return
            lacking = rows.lacking(self._mapping)
            if self.first is None or not self.first[1]:
                with contextlib.suppress(InvalidArgument):
                    # the first row may be bad
                    self.first = file.uri, []
                    self.first = file.uri, rows.fields()
            self._hints |= {field: hint for field, hint in lacking.items() if hint is not None}
            self._found(field for field in self._mapping.names if field not in lacking)
            if isinstance(rows, ColumnsFile):
                self.has_entry = True
            elif whole:
                self._look_at_rows(rows)
            else:
                assert isinstance(rows, TextFile)
                self.is_cut = self.is_cut or rows.compression is not None or len(rows.head) < file.size_bytes
                self._look_at_head(file.uri, rows)
        except UNREADABLE as error:
            self.error = self.error or error

    def _look_at_rows(self, rows: RowFile) -> None:
        keys = len(self._mapping.keys)
        for batch in rows.reading(self._mapping, 0, _TO_THE_END).batches(0):
            if batch.bad and self._problem is None:
                self._problem = f"{rows.file}, {batch.bad[0].where}: {batch.bad[0].problem}"
            if batch.rows:
                self.has_entry = True
                has_fields = [*(batch.has_keys or [False] * keys), *[True] * (len(self._mapping.names) - keys)]
                self._found(field for field, has in zip(self._mapping.names, has_fields, strict=True) if has)
            if self.is_over:
                break

    def _look_at_head(self, uri: str, rows: TextFile) -> None:
        mapping, keys = self._mapping, len(self._mapping.keys)
        for line in rows.split(rows.head[rows.begin :]):
            if not (line := line.lstrip(b"\0")).strip():
                continue
            try:
                if len(line) >= MAX_ROW_BYTES:
                    raise InvalidArgument(too_long(0))
                members = rows.members_of(line, mapping)
            except InvalidArgument as error:
                self._problem = self._problem or f"{uri}: {_bad_row(rows.head, error)}"
                continue
            has_fields = [_is_key(member) for member in members[:keys]]
            has_fields += [member not in (None, "", []) for member in members[keys:]]
            self._found(field for field, has in zip(mapping.names, has_fields, strict=True) if has)
            for field, key, member in zip(mapping.names, mapping.keys, members, strict=False):
                each = member[0] if isinstance(member, list) and member else member
                if isinstance(each, dict):
                    hint = no_key(rows.file, key, [*each], is_list=isinstance(member, list))
                    self._hints.setdefault(field, hint)
            try:
                mapping.time_ms(members[keys])
                for topic in members[keys + 1 :]:
                    mapping.topic_of(topic)
                self.has_entry = True
            except InvalidArgument as error:
                self._problem = self._problem or f"{uri}: {_bad_row(b'', error)}"
            if self.is_over:
                break

    def _found(self, fields: Iterator[tuple[str, str]]) -> None:
        there = {*fields}
        self.missing = [field for field in self.missing if field not in there]


def _is_key(member: Any) -> bool:
    with contextlib.suppress(ValueError):
        return any(key_texts(key_value(member)))
    return False


def _bad_row(head: bytes, error: InvalidArgument) -> str:
    """Return the problem of the first row, or of a text of another encoding."""
    try:
        head.decode()
    except UnicodeDecodeError:
        command = "iconv -f LATIN1 -t UTF-8 FILE > FILE.utf8"
        return f"the text is not UTF-8: write UTF-8, for example with `{command}`"
    return f"the first row is bad: {error}"


def _of_files(count: int, uri: str) -> str:
    return uri if count == 1 else f"{count:,} files"


def _spread(files: Sequence[SourceFile]) -> Iterator[SourceFile]:
    """Yield the first file, the last one, and some between them at equal distances."""
    count = min(len(files), _MOST_HEADS)
    places = [number * (len(files) - 1) // max(1, count - 1) for number in range(count)]
    yield from (files[at] for at in dict.fromkeys([places[0], places[-1], *places] if places else []))


def mapping_of(options: RowOptions, keys: Sequence[str] | None) -> tuple[str | None, RowMapping]:
    """Return the topic of all rows (None: a field has it) and the mapping. Raises `InvalidArgument`."""
    if options.topic is None:
        raise InvalidArgument("--topic is missing: it names the topic of the rows")
    unit = None if options.time_unit in (None, "auto") else options.time_unit
    path = options.topic.removeprefix(TOPIC_FIELD) if options.topic.startswith(TOPIC_FIELD) else None
    dialect = None
    if options.delimiter is not None or options.quote is not None:
        delimiter = "\t" if options.delimiter == "\\t" else options.delimiter
        dialect = Dialect(delimiter, {None: '"', "none": ""}.get(options.quote, options.quote or "none"))
    zone = None if options.time_zone is None else TimeZone(options.time_zone)
    of_times: Any = {"unit": unit, "zone": zone}
    mapping = RowMapping(tuple(keys or ()), options.time or DEFAULT_TIME, topic=path, dialect=dialect, **of_times)
    return (options.topic if path is None else None), mapping


def first_rows(files: Sequence[SourceFile], dialect: Dialect | None) -> tuple[SourceFile, RowFile] | None:
    """Return the first file that has rows, and its rows; None: no file has any. Raises the error if none is read."""
    failure: TieredIndexError | None = None
    for file in files:
        try:
            rows = open_rows(file.file, file.size_bytes, file.head(), dialect)
        except UNREADABLE as error:
            failure = failure or error
            continue
        if rows.length_bound(0):
            return file, rows
    if failure is not None:
        raise failure
    return None


@dataclass
class CheckedFiles(contextlib.AbstractContextManager["CheckedFiles"]):
    """The files of a run, which are checked before an index is made. Close it as a context.

    `files` are listed, what is missing is in `unlisted`. `topic` is None if a field of the `mapping` has it.
    """

    files: list[SourceFile]
    unlisted: Unlisted
    topic: str | None
    mapping: RowMapping
    _stack: contextlib.ExitStack

    @classmethod
    def open(cls, run: SourceRun, config: IndexConfig) -> Self:
        """List the files of a run, and check them. Raises as `SourceConnector.check`."""
        options: FilesOptions = run.options or FilesOptions()
        if STDIN in run.addresses:
            raise InvalidArgument("rows of stdin can't be read again: write them to a file, and give the file")
        for address in run.addresses:
            check_outside_tables(address, config)
        with contextlib.ExitStack() as stack:
            unlisted = Unlisted()
            listed = listed_files(run.addresses, config, may_lack=run.follow, unlisted=unlisted)
            files = stack.enter_context(listed)
            _check_options(files, options)
            topic, mapping = mapping_of(options.rows, options.key)
            checked = cls(files, unlisted, topic, mapping, stack)
            if not run.follow or checked.size_bytes >= HEAD_BYTES:
                checked._check_fields(run, config)
            checked._stack = stack.pop_all()
        return checked

    @property
    def size_bytes(self) -> int:
        """The size of all files."""
        return sum(file.size_bytes for file in self.files)

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _check_fields(self, run: SourceRun, config: IndexConfig) -> None:
        """Raise `InvalidArgument` for fields that no row of the files has, and the error of files without a row."""
        search = FieldSearch(self.mapping)
        search.look_at_heads(self.files)
        if search.is_over or (search.first is None and search.error is None):
            return
        known = _known_keys(config, self.topic)
        if search.first is None and search.error is not None:
            if known:
                # the log notes the files
                return
            raise search.error
        if not search.misses(known, keys_may_come=run.follow):
            return
        if search.is_cut:
            run.note(f"looking at all rows, because at the start {search.failure(len(self.files))}")
            search.look_at_all(self.files)
        if search.misses(known, keys_may_come=run.follow):
            raise search.failure(len(self.files))


def _check_options(files: Sequence[SourceFile], options: FilesOptions) -> None:
    """Raise `InvalidArgument` that names all options which are missing, and the fields of the first file."""
    missing = {"--topic": options.rows.topic is None, "--key": not options.key}
    if not any(missing.values()):
        return
    there, fields = "", list[str]()
    with contextlib.suppress(TieredIndexError):
        first = first_rows(files, None)
        fields = [] if first is None else first[1].fields()
    if fields and first is not None:
        missing["--time"] = options.rows.time is None and DEFAULT_TIME not in fields
        there = f"; the first row of {first[0].uri} has {listed_names(fields, 30)}"
    names = [option for option, is_missing in missing.items() if is_missing]
    needed = "rows need a topic, the field of a key (such as --key order_id) and that of the time"
    raise InvalidArgument(f"{listed_names(names)} {'is' if len(names) == 1 else 'are'} missing: {needed}{there}")


def _known_keys(config: IndexConfig, topic: str | None) -> set[str]:
    """Return the keys of the rows of files of a topic (None: of all topics by a field) that an index has already."""
    store = linked_store("", TOPICS_QUEUE) if topic is None else linked_store(topic, FILES_QUEUE)
    with contextlib.suppress(ConfigError), IndexReader.open(config=config) as reader:
        described = of_store(reader.topic_documents().values(), store)
        return key_rules(() if described is None else (described,))
    return set()
