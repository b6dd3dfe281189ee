"""The output of commands: tables, fields, lines and progress for people, JSON for programs. One thread.

Answers are written to stdout; notes, logs and errors to stderr. JSON is printable ASCII, so that any pipe accepts it.
Topics, keys, names and servers' messages are untrusted: all text, also of logs, passes through `printable`, and markup
is not interpreted.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import re
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TextIO

from tiered_index.base.encoding import json_text
from tiered_index.base.tracing import request_id
from tiered_index.base.units import LIKELY_SECONDS, MAX_TIMESTAMP_MS, format_time
from tiered_index.errors import CorruptFile, DiskFull, LockHeld, TieredIndexError, did_you_mean, listed

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from tiered_index.service.log.records import StoredObject

_TIMES = re.compile(r"\b(begin_ms|end_ms) (\d{1,15})\b")
# Logger of commands' notes
_NOTES = logging.getLogger("tiered_index.cli")
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
# Widest table, outside a terminal, that people can read
_READABLE = 120
# Most rows of a table, and texts of a field
_ROWS, _TEXTS = 20, 5
# A field whose members are named by operations, without units
_REQUESTS = "requests"
# Fields whose members are named by users, without units
_OF_USERS = ("sources", "source_positions", "skipped_reasons", "properties")
# Fields that only programs need
_DETAILS = ("metrics", "quarantined_first")
# Time between two lines of progress off a terminal
_LINE_INTERVAL_S = 5.0


def printable(text: str) -> str:
    """Return `text` as one line without terminal commands and marks that change the reading order.

    Characters that Unicode does not count as printable (C0 and C1 controls, line ends, marks of direction, surrogates)
    become Python's escapes.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def _printable_lines(text: str, indent: str = "") -> str:
    """Return `text` through `printable`, except for tabs and line ends; `indent` follows each line end."""
    return f"\n{indent}".join("\t".join(map(printable, line.split("\t"))) for line in text.split("\n"))


class PrintableFormatter(logging.Formatter):
    """Formats log lines through `printable`; a traceback keeps its lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the base class's name
        """Return the line without a traceback."""
        return printable(super().formatMessage(record))

    def format(self, record: logging.LogRecord) -> str:
        """Return the line and its traceback."""
        return _printable_lines(super().format(record))


class JsonFormatter(logging.Formatter):
    """Formats log records as JSON lines: time, level, logger, message, request id, and the members of `fields`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line: dict[str, Any] = {
            "time": format_time(int(record.created * 1000)),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (request := request_id.get()) is not None:
            line["request_id"] = request
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json_text(line)


def human_bytes(size_bytes: float) -> str:
    """Return a size for people: ``7.8 MiB``."""
    unit = 0
    while abs(size_bytes) >= 1024 and unit < len(_UNITS) - 1:
        size_bytes, unit = size_bytes / 1024, unit + 1
    return f"{size_bytes:,.1f} {_UNITS[unit]}" if unit else f"{size_bytes:,.0f} B"


def human_count(count: float) -> str:
    """Return a count with separators; small counts that are not whole have one decimal."""
    return f"{count:,.0f}" if count >= 100 or count == int(count) else f"{count:,.1f}"


def counted(count: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun: ``1 file``, ``2 files``, ``3 entries``."""
    return f"{human_count(count)} {noun if count == 1 else plural or noun + 's'}"


def unknown_topic(topic: str, known: Iterable[str]) -> str:
    """Return the hint that no file has a topic or pattern; `known` are the topics of files."""
    return f"no file that was read has topic {topic!r}{did_you_mean(topic, known)}"


def states(counts: Mapping[str, int]) -> str:
    """Return counts by state as text: ``2 unsealed, 9 uploaded``; empty for none."""
    return ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))


def human_seconds(seconds: float) -> str:
    """Return a duration for people: ``0.85 ms``, ``12.3 s``, ``2 min 05 s``."""
    if seconds < 1:
        return f"{seconds * 1000:.{0 if seconds >= 0.1 else 2}f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"


def likely_seconds(what: str, time_ms: int, verb: str = "ends") -> str | None:
    """Return a hint that a number of milliseconds was perhaps meant as seconds; None for other numbers."""
    if not LIKELY_SECONDS[0] <= time_ms < LIKELY_SECONDS[1]:
        return None
    question = f"{what} {verb} at {format_time(time_ms)}: did you mean milliseconds?"
    return f"{question} {time_ms} seconds are {time_ms * 1000}"


def describe_object(stored: StoredObject) -> dict[str, Any]:
    """Return the description of a stored object for JSON; times are those of its first and last second."""
    return {
        "object": stored.name,
        "entries": stored.count,
        "bytes": stored.size_bytes,
        "begin_ms": stored.second_min * 1000,
        "end_ms": stored.second_max * 1000,
    }


def describe_error(error: TieredIndexError) -> dict[str, Any]:
    """Return the fields of an error in addition to its message, for JSON."""
    details: dict[str, Any] = {"exit_code": error.exit_code}
    if isinstance(error, LockHeld):
        details |= {"pid": error.pid, "host": error.host}
    if isinstance(error, CorruptFile):
        details |= {"file": error.file, "offset": error.offset}
        # the range of a log that is damaged, deleted or rewritten
        details |= {
            name: value for name in ("begin", "end", "messages") if (value := getattr(error, name, None)) is not None
        }
    return details


def error_document(error: TieredIndexError) -> dict[str, Any]:
    """Return an error as a field of a JSON document, in the form that is also written to stderr."""
    return {"error": {"type": type(error).__name__, "message": str(error), **describe_error(error)}}


class Output:
    """The output of a command: a table or JSON on stdout, notes on stderr.

    A command passes its result in both forms: a document for programs (`answer`), and lines, fields and tables for
    people. `as_json` selects the form that is written, so commands need not check it.
    """

    def __init__(self, *, as_json: bool, quiet: bool = False) -> None:
        self.as_json = as_json
        self.quiet = quiet
        # Whether notes are log records for `JsonFormatter`
        self.logs_json = False
        # The flags of the present command by the library's names
        self.flags: dict[str, str] = {}
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):  # a test's stream has no encoding
                stream.reconfigure(errors="backslashreplace")
        self._terminal = sys.stdout.isatty()

    def answer(self, document: dict[str, Any], *, streamed: bool = False) -> None:
        """Write the one JSON document of a command, or the last line of its NDJSON."""
        if self.as_json:
            if isinstance(error := document.get("error"), dict):
                document = document | {"error": error | {"message": self.in_flags(error["message"])}}
            self._write(json_text(document, indent=2 if self._terminal and not streamed else None) + "\n")

    def record(self, record: object) -> None:
        """Write one line of NDJSON, in both forms of output."""
        self._write(json_text(record) + "\n")

    def value(self, json_line: str) -> None:
        """Write a line of JSON, as `encoding.json_line` returns it, in both forms of output."""
        self._write(json_line + "\n")

    def line(self, text: str = "") -> None:
        """Write one line of text."""
        self._text(printable(text))

    def summary(self, text: str) -> None:
        """Write a line about the whole answer; silent with --quiet."""
        if not self.quiet:
            self.line(text)

    def lines(self, text: str) -> None:
        """Write a text of several lines; later ones are indented to distinguish them from the command's own."""
        self._text(_printable_lines(text, "    "))

    def show(
        self, document: Mapping[str, Any], *, without: Collection[str] = (), streamed: bool = False, most: int = _ROWS
    ) -> None:
        """Write a result; people do not see the fields `without`. `streamed`: it is the last line of NDJSON.

        `most` as in `fields`.
        """
        self.answer(dict(document), streamed=streamed)
        self.fields(document, without=without, most=most)

    def fields(
        self, fields: Mapping[str, Any], *, title: str | None = None, without: Collection[str] = (), most: int = _ROWS
    ) -> None:
        """Write fields for people: a line for each value, then with titles the large documents, and the lists as
        tables of at most `most` rows.

        The suffix of a field's name is its unit (`_bytes`, `_ms`, `_s`, `_usd`) and selects its format. Fields without
        a value are left out.
        """
        if self.as_json:
            return
        hidden = {*_DETAILS, *without}
        plain = json.loads(json_text({name: value for name, value in fields.items() if name not in hidden}))
        parts = {name: value for name, value in plain.items() if name != _REQUESTS and _is_part(value)}
        own = {label(name): value_text(name, value) for name, value in plain.items() if name not in parts}
        self._pairs(own, title)
        for name, part in parts.items():
            if isinstance(part, dict) and name in _OF_USERS:
                self._pairs({key: value_text("", member) for key, member in part.items()}, label(name))
            elif isinstance(part, dict):
                self.fields(part, title=label(name))
            else:
                self.rows(label(name), part, most=most)

    def rows(
        self,
        title: str,
        rows: Sequence[Mapping[str, Any]],
        count: int | None = None,
        *,
        most: int = _ROWS,
        is_listed: bool = True,
    ) -> None:
        """Write the first `most` of `rows` for people; `count`: number of all rows, if more than `rows`.

        They are a table or, if that is too wide and `is_listed`, a list.
        """
        cells = [{name: value_text(name, _length(value)) for name, value in row.items()} for row in rows[:most]]
        names = [name for name in dict.fromkeys(itertools.chain(*cells)) if any(row.get(name) for row in cells)]
        numbers = {label(name) for name in names if all(isinstance(row.get(name), int | float | None) for row in rows)}
        if cells:
            table = [[row.get(name) for name in names] for row in cells]
            self.table([label(name) for name in names], table, title=title, right=numbers, is_listed=is_listed)
        if rest := (len(rows) if count is None else count) - len(cells):
            self.line(f"and {rest:,} more {title}")

    def table(
        self,
        columns: Sequence[str],
        rows: Iterable[Sequence[object]],
        *,
        title: str = "",
        right: Collection[str] = (),
        is_listed: bool = False,
    ) -> None:
        """Write a table with a line for each row; columns in `right` are aligned to the right.

        `is_listed`: if the table is wider than the terminal, or than 120 columns elsewhere, write a list of the rows.
        """
        if self.as_json:
            return
        # imported on use, because loading is slow
        from rich.cells import cell_len

        cells = [["" if cell is None else printable(str(cell)) for cell in row] for row in rows]
        widths = [max(map(cell_len, column)) for column in zip(columns, *cells, strict=True)]
        # a cell has a blank on each side, and three blanks stand between two cells
        width = sum(widths) + 3 * len(widths) - 1
        if title:
            self.line(title)
        if is_listed and width > (shutil.get_terminal_size().columns if self._terminal else _READABLE):
            for row in cells:
                self._pairs(dict(zip(columns, (cell or None for cell in row), strict=True)))
                self.line()
            return
        rule = "\u2500" if _can_write("\u2500") else "-"
        aligned = list(zip(widths, [name in right for name in columns], strict=True))
        self._write(f"\n{_drawn(columns, aligned)} {rule * (width - 2)}\n")
        for row in cells:
            self._write(_drawn(row, aligned))
        self._write("\n")

    def _pairs(self, fields: Mapping[str, str | None], title: str | None = None) -> None:
        """Write names and texts, one per line; values of None are left out."""
        if title:
            self.line(title)
        width = max(map(len, fields), default=0)
        for name, text in fields.items():
            if text is not None:
                self.line(f"  {name:<{width}}  {text}")

    def progress(self, title: str, total: int | None) -> ProgressDisplay:
        """Return a progress display on stderr, which is off with --quiet and JSON logs."""
        return ProgressDisplay(title, total, quiet=self.quiet or self.logs_json)

    def _text(self, text: str) -> None:
        if not self.as_json:
            self._write(text + "\n")

    def _write(self, text: str) -> None:
        with writing_stdout():
            sys.stdout.write(text)

    def flush(self) -> None:
        """Flush stdout. Raises `DiskFull` if it can't be written, `BrokenPipeError`."""
        with writing_stdout():
            sys.stdout.flush()

    def note(self, text: str) -> None:
        """Write a note to stderr, or to the log with --log-format json; silent with --quiet."""
        if self.quiet:
            return
        if self.logs_json:
            _log(logging.INFO, text)
        else:
            tell(printable(text) + "\n")

    def remark(self, text: str) -> None:
        """Write a note for people that programs find in the document; silent with --quiet."""
        if not self.as_json:
            self.note(text)

    def in_flags(self, text: str) -> str:
        """Return a text of the library with the command's flags in place of its names, and ISO times."""
        text = _TIMES.sub(lambda time: f"{time[1]} {format_time(int(time[2]))}", text)
        for name in sorted(self.flags, key=len, reverse=True):
            text = re.sub(rf"(?<![\w.'\"-]){name}(?!=True|[\w'\"])", self.flags[name], text)
        return text

    def error(self, kind: str, message: str, **details: Any) -> None:
        """Report an error on stderr: one line, or one JSON document."""
        message = self.in_flags(message)
        if self.logs_json:
            _log(logging.ERROR, message, error={"type": kind, **details})
        elif self.as_json:
            tell(json_text({"error": {"type": kind, "message": message, **details}}) + "\n")
        else:
            tell(_printable_lines(f"tiered-index: {message}", "    ") + "\n")

    def error_line(self, text: str) -> None:
        """Add a line for people to an error that was reported."""
        if not (self.as_json or self.logs_json):
            tell(f"  {printable(text)}\n")

    def traceback(self, error: BaseException) -> None:
        """Write an error's traceback to stderr."""
        tell(_printable_lines("".join(traceback.format_exception(error)).removesuffix("\n")) + "\n")


def _drawn(row: Sequence[str], aligned: Sequence[tuple[int, bool]]) -> str:
    """Return a line of a table; `aligned`: width of each cell, and whether it is aligned to the right."""
    from rich.cells import cell_len

    padded = []
    for cell, (width, is_right) in zip(row, aligned, strict=True):
        blank = " " * (width - cell_len(cell))
        padded.append(blank + cell if is_right else cell + blank)
    return f" {'   '.join(padded)} \n"


def _log(level: int, text: str, **fields: Any) -> None:
    """Add a record to the log, regardless of the log level."""
    _NOTES.handle(_NOTES.makeRecord(_NOTES.name, level, "", 0, text, (), None, extra={"fields": fields}))


def tell(text: str) -> None:
    """Write to stderr; ignore errors."""
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except OSError:
        discard(sys.stderr)


@contextlib.contextmanager
def writing_stdout() -> Iterator[None]:
    """Raise `DiskFull` if stdout can't be written in the block, and `BrokenPipeError` if the pipe is closed."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        discard(sys.stdout)
        raise DiskFull(f"stdout can't be written: {error.strerror}") from error


def _can_write(text: str) -> bool:
    """Return whether stdout's encoding has the characters of a text."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, "ignore").decode(encoding) == text


def discard(stream: TextIO) -> None:
    """Redirect a stream to /dev/null: otherwise the interpreter would report an error when it flushes at exit."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def label(name: str) -> str:
    """Return the name of a field for people."""
    return name.removesuffix("_ms").removesuffix("_s").replace("_", " ")


def _member(member: Any) -> str:
    """Return the text of a list's member: of a header of Kafka "name: value", and "name (null)" without a value."""
    if isinstance(member, list):
        if member[-1:] == [None]:
            return f"{': '.join(map(str, member[:-1]))} (null)"
        return ": ".join(map(str, member))
    return str(member)


def value_text(name: str, value: Any) -> str | None:
    """Return the text of a field's value for people, None for no value."""
    if value is None or value in ("", [], {}):
        return None
    if isinstance(value, dict) and name in _OF_USERS:
        return ", ".join(f"{key} {value_text('', member)}" for key, member in value.items())
    if isinstance(value, dict):
        named = {key: name if name == _REQUESTS else key for key in value}
        members = {label(key): value_text(named[key], member) for key, member in value.items()}
        return ", ".join(f"{key} {member}" for key, member in members.items() if member is not None) or None
    if isinstance(value, list | tuple):
        texts = [_member(member) for member in value]
        return listed(texts, _TEXTS)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, int | float):
        return str(value)
    if "bytes" in name.split("_"):
        return human_bytes(value)
    if name == "second" or name.endswith("_ms"):
        time_ms = int(value * 1000 if name == "second" else value)
        return format_time(time_ms) if 0 <= time_ms <= MAX_TIMESTAMP_MS else str(value)
    if name.endswith("_s"):
        # imported on use: the list of commands needs none of what it loads
        from tiered_index.base.units import human_duration

        return human_duration(value) if isinstance(value, int) else human_seconds(value)
    return f"${value:.6f}" if "usd" in name.split("_") else human_count(value)


def _length(value: Any) -> Any:
    """Return the length of a list that does not fit into a cell, any other value as it is."""
    return len(value) if isinstance(value, list | tuple) and value and not isinstance(value[0], str) else value


def _is_part(value: Any) -> bool:
    """Return whether a value does not fit into a line: a list of documents, or a document of many fields."""
    if isinstance(value, list):
        return bool(value) and isinstance(value[0], dict)
    return isinstance(value, dict) and len(value) > _TEXTS


class ProgressDisplay:
    """Progress of `total` steps (None: unknown): a bar on a terminal, else a line every few seconds. One thread."""

    def __init__(self, title: str, total: int | None, *, quiet: bool) -> None:
        self._title = printable(title)
        self._total = total
        self._quiet = quiet
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._printed_s = time.monotonic()
        # the steps that `counting` counts
        self._lock, self._done = threading.Lock(), 0

    def __enter__(self) -> ProgressDisplay:
        if not self._quiet and sys.stderr.isatty():
            # imported on use: most commands draw no bar
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                Progress,
                TaskProgressColumn,
                TextColumn,
                TimeElapsedColumn,
                TimeRemainingColumn,
            )

            columns = (
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                TaskProgressColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[detail]}", markup=False),
            )
            self._bar = Progress(*columns, console=Console(file=sys.stderr), transient=True)
            self._task = self._bar.add_task(self._title, total=self._total, detail="")
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, done: int, detail: str = "", total: int | None = None) -> None:
        """Show the number of `done` steps; `total` replaces the total."""
        if self._quiet:
            return
        self._total = self._total if total is None else total
        detail = printable(detail)
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, total=self._total, detail=detail)
            return
        now = time.monotonic()
        if now - self._printed_s >= _LINE_INTERVAL_S:
            self._printed_s = now
            share = f"{100 * done / self._total:.0f} %" if self._total else f"{done:,}"
            tell(f"{self._title}: {share}{', ' + detail if detail else ''}\n")

    def counting(self, unit: str) -> Callable[[int], None]:
        """Return a function that adds to the number of done steps, from any thread, and shows it."""
        return partial(self._count, unit)

    def _count(self, unit: str, more: int) -> None:
        with self._lock:
            self._done += more
            self.update(self._done, f"{self._done:,} {unit}")
