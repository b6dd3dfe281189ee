"""Where a row has its keys, its time and its topic, and which times and keys these values are. Pure.

Values of many rows are read together, as a column. None in place of a column: a value must be read by itself.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tiered_index.base.encoding import json_text
from tiered_index.base.units import LIKELY_SECONDS, MAX_TIMESTAMP_MS, time_with_zone
from tiered_index.connectors.files.rows.columns import is_text, plain_text, times_ms
from tiered_index.connectors.files.rows.values import key_value
from tiered_index.connectors.files.rows.zone import TimeZone, UnclearTimes
from tiered_index.connectors.json_paths import FieldReader, compiled_path, key_texts, plain_path
from tiered_index.errors import InvalidArgument
from tiered_index.format.keys.spelling import named_key, split_name
from tiered_index.format.segments.segment import LinkedSegment, TimeRule
from tiered_index.service.read.answers.rows import check_topic
from tiered_index.service.write.validation import milliseconds
from tiered_index.types import MAX_KEY_UNITS

Unit = Literal["s", "ms", "us", "ns"]
_PER_SECOND: dict[Unit, int] = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
# the type of keys: `put_batch` copies the offsets of others
KEY_TYPE = pa.large_string()
TOPIC_FIELD = "field:"
"""Begin of a `--topic` that is a field of the rows."""
_DELIMITERS = (",", "\t", ";", "|")
_NUMBER_TEXT = r"^-?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?$"
_NUMBER = re.compile(rf"\s*{_NUMBER_TEXT[1:-1]}\s*")
# times of shops and of nginx that can mean only one day: 29.11.2026 14:05:06, and 29/Nov/2026:14:05:06 +0100
_DOTTED_TIME = re.compile(r"(\d\d?)\.(\d\d?)\.(\d{4})(?:,? +(\d\d?)(:\d\d(?::\d\d(?:[.,]\d+)?)?))?", re.ASCII)
_SERVER_TIME = re.compile(r"(\d\d)/([A-Z][a-z]{2})/(\d{4}):(\d\d:\d\d:\d\d)(?: ([+-]\d{4}))?", re.ASCII)
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


@dataclass(frozen=True, slots=True)
class Dialect:
    """The characters of CSV: `delimiter` between values, None if the header decides; `quote` around values, "" if none.

    Each is one ASCII character other than a newline. Raises `InvalidArgument`.
    """

    delimiter: str | None = None
    quote: str = '"'

    def __post_init__(self) -> None:
        for option, mark in (("--delimiter", self.delimiter), ("--quote", self.quote or None)):
            if mark is not None and (len(mark) != 1 or not mark.isascii() or mark in "\0\r\n"):
                raise InvalidArgument(f"{option} is one ASCII character other than a newline, not {mark!r}")
        if self.delimiter == self.quote:
            raise InvalidArgument(f"--delimiter and --quote are both {self.quote!r}: they must differ")

    @property
    def delimiters(self) -> Sequence[str]:
        """The characters of which one is between values."""
        found_out = [mark for mark in _DELIMITERS if mark != self.quote]
        return found_out if self.delimiter is None else [self.delimiter]

    @classmethod
    def of(cls, segment_format: str) -> Dialect | None:
        """Return the dialect that the format of a segment names; None: it names none."""
        _, _, marks = segment_format.partition("+")[0].partition(":")
        if not re.fullmatch("[0-9a-f]{4}", marks):
            return None
        named = bytes.fromhex(marks).decode("latin-1")
        return cls(named[0], named[1].strip("\0"))


class RowRule(NamedTuple):
    """How rows are to be read, as far as a run says so: their times, the field of the topic, and the dialect of CSV.

    `paths` are those of all fields.
    """

    times: TimeRule
    topic: str | None
    dialect: Dialect | None
    paths: Sequence[str]

    def is_other(self, segment: LinkedSegment) -> bool:
        """Return whether the rows of a segment were read in another way."""
        pairs = zip(segment.time_rule or (), self.times, strict=False)
        return (
            any(after is not None and before is not None and after != before for before, after in pairs)
            or segment.topic_field != self.topic
            or (segment.format.startswith("csv") and self._has_other_dialect(segment))
        )

    def _has_other_dialect(self, segment: LinkedSegment) -> bool:
        if self.dialect is None:
            return False
        before = Dialect.of(segment.format) or Dialect(",")
        return before.quote != self.dialect.quote or self.dialect.delimiter not in (None, before.delimiter)

    def fields_of_folders(self, folders: Mapping[str, str]) -> dict[str, str]:
        """Return the fields that the folders of a file name, as `partition_of`, and that paths use."""
        return {
            name: value
            for name, value in folders.items()
            if any(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", path) for path in self.paths)
        }


@dataclass
class RowMapping:
    """The fields with the keys, the time and perhaps the topic of a row: JMESPaths, or names of columns.

    `keys` are those of `--key`, each a path, perhaps after a name, as in ``order=order_id``. `unit` is that of times
    that are numbers. None: the first ones decide, for the whole run; then `is_guessed`, and a later number that is
    likely in another unit only is a bad row. `has_numbers`: a time was a number. `topic` None: all rows have one topic.
    `dialect` is that of CSV files; None: their headers decide. `zone` is that of times without one; None: UTC. Then
    `has_zoneless` says that there was such a time. A row of a topic that is among `of_others` is bad: another connector
    writes that topic.
    """

    keys: Sequence[str]
    time: str
    unit: Unit | None = None
    topic: str | None = None
    dialect: Dialect | None = None
    is_guessed: bool = False
    zone: TimeZone | None = None
    of_others: frozenset[str] = frozenset()
    has_numbers: bool = field(default=False, init=False)
    has_zoneless: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if not self.keys:
            raise InvalidArgument("--key is missing: it says where a row has its key, such as --key order_id")
        named = [split_name(key) for key in self.keys]
        self.key_names = [name for name, _ in named]
        """The name of each key, as of `split_name`."""
        topic = [] if self.topic is None else [(f"--topic {TOPIC_FIELD}", self.topic)]
        self.names = [*((f"--key {name}", path) for name, path in named), ("--time ", self.time), *topic]
        """Option and path of all fields: the keys, the time, and the topic if it is a field."""
        self.paths = [path_of(path) for _, path in self.names]
        self.reader = FieldReader.of(self.paths)

    @property
    def unclear_times(self) -> UnclearTimes:
        """The times that were read and that the clocks of the zone show twice, or not at all."""
        return UnclearTimes() if self.zone is None else self.zone.unclear

    def with_keys(self, keys: Sequence[str]) -> RowMapping:
        """Return the same fields with other keys."""
        mapping = replace(self, keys=keys)
        mapping.has_numbers, mapping.has_zoneless = self.has_numbers, self.has_zoneless
        return mapping

    def with_times(self, rule: TimeRule | None) -> RowMapping:
        """Return the same fields with times that are read by a rule; None: as these."""
        path, unit, zone = rule or (self.time, None, None)
        if path == self.time and unit in (None, self.unit) and zone in (None, self._zone_name):
            return self
        of_times: Any = {"unit": unit, "is_guessed": unit is not None, "zone": None if zone is None else TimeZone(zone)}
        return replace(self, time=path, **of_times)

    @property
    def _zone_name(self) -> str:
        return "UTC" if self.zone is None else self.zone.name

    def time_rule(self, *, is_whole: bool = True) -> TimeRule:
        """Return how times are read. Unless it `is_whole`, there may be numbers, and times without a zone."""
        unit = self.unit if self.has_numbers or not is_whole else None
        return self.time, unit, self._zone_name if self.has_zoneless or not is_whole else None

    @property
    def given(self) -> RowRule:
        """How rows are to be read, as far as that is given."""
        times = self.time, None if self.is_guessed else self.unit, None if self.zone is None else self.zone.name
        return RowRule(times, self.topic, self.dialect, [path for _, path in self.names])

    def shown(self, fields: Iterable[tuple[str, str]]) -> str:
        """Return the options of fields that a file lacks, as `names`. A path that is no JMESPath is shown as one."""
        texts = []
        for option, path in fields:
            text = f"{option}{path}"
            try:
                compiled_path(path, "it")
            except InvalidArgument as error:
                text = f"{text} (as a name; {error})"
            texts.append(text)
        return ", ".join(texts)

    def names_of_path(self, path: str) -> tuple[str, ...] | None:
        """Return the names of a plain path; None: it is another expression."""
        return plain_path(path_of(path).parsed)

    def decide(self, number: float) -> Unit:
        """Return the unit of times that are numbers, which the first `number` decides. Raises `InvalidArgument`."""
        likely = [unit for unit in _PER_SECOND if _may_count(unit, number)]
        if self.unit is None:
            if len(likely) != 1:
                raise InvalidArgument(
                    f"time {number!r} is of the years 1990 to 2100 in no unit of s, ms, us and ns: give --time-unit"
                )
            self.unit, self.is_guessed = likely[0], True
        elif self.is_guessed and likely and self.unit not in likely:
            raise InvalidArgument(
                f"time {number!r} seems to be in {likely[0]}, but the first one was in {self.unit}: give --time-unit"
            )
        self.has_numbers = True
        return self.unit

    def time_ms(self, value: Any) -> int:
        """Return the time of one row in epoch milliseconds. Raises `InvalidArgument`."""
        if value is None or value == "":
            raise InvalidArgument(f"no time at {self.time}")
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise InvalidArgument(f"{self.time} is no time: {value!r:.80}")
        if isinstance(value, str) and not _NUMBER.fullmatch(value):
            try:
                time_ms, has_zone = time_with_zone(iso_time(value))
                if not has_zone:
                    time_ms = int(self.from_clocks(np.array([time_ms]))[0])
            except ValueError as error:
                raise InvalidArgument(
                    f"{self.time} is neither a number nor an ISO 8601 time, 29.11.2026 14:05 or "
                    f"29/Nov/2026:14:05:06 +0100: {value!r:.80}"
                ) from error
        else:
            is_integer = isinstance(value, int) or (
                isinstance(value, str) and value.strip().removeprefix("-").isdecimal()
            )
            try:
                number = int(value) if is_integer else float(value)
                time_ms = int(number * 1000 // _PER_SECOND[self.decide(number)])
            except (ValueError, OverflowError) as error:
                if isinstance(error, InvalidArgument):
                    raise
                raise InvalidArgument(f"{self.time} is out of range: {value!r:.80}") from error
        if not 0 <= time_ms <= MAX_TIMESTAMP_MS:
            raise InvalidArgument(f"{self.time} is out of range: {value!r:.80}")
        return time_ms

    def times_ms(self, values: Sequence[Any] | pa.Array) -> npt.NDArray[np.int64] | None:
        """Return the times of rows in epoch milliseconds; None: one of them must be read by itself."""
        try:
            column = values if isinstance(values, pa.Array) else _one_type(values)
            if column.null_count or not len(column):
                return None
            if pa.types.is_timestamp(column.type) or pa.types.is_date(column.type):
                times = self.ms_of_timestamps(column).to_numpy()
            elif pa.types.is_integer(column.type):
                times = self._ms_of_integers(column.cast(pa.int64()).to_numpy())
            elif pa.types.is_floating(column.type):
                times = self._ms_of_floats(column.cast(pa.float64()).to_numpy())
            elif is_text(column.type):
                column = plain_text(column)
                is_number = pc.match_substring_regex(column, _NUMBER_TEXT)
                if not pc.any(is_number).as_py():
                    if iso_time(first := column[0].as_py()) != first:
                        column = pa.array([iso_time(text) for text in column.to_pylist()])
                    times = times_ms(pa.chunked_array([column]), self.from_clocks).to_numpy()
                elif pc.all(is_number).as_py():
                    times = self._ms_of_texts(column)
                else:
                    return None
            else:
                return None
        except (pa.ArrowException, OverflowError, InvalidArgument, UnicodeEncodeError):
            return None
        is_sound = int(times.min()) >= 0 and int(times.max()) <= MAX_TIMESTAMP_MS
        return np.asarray(times, np.int64) if is_sound else None

    def ms_of_timestamps(self, column: pa.Array) -> pa.Array:
        """Return times or dates of a column as epoch milliseconds. Null stays null, and out of range what is so."""
        if pa.types.is_date(column.type):
            column = column.cast(pa.timestamp("ms"))
        kind = column.type
        if kind.unit == "s":
            most_s = MAX_TIMESTAMP_MS // 1000 + 1
            seconds = pc.min_element_wise(column.cast(pa.int64()), most_s, skip_nulls=False)
            column = pc.max_element_wise(seconds, -1, skip_nulls=False).cast(kind)
        times = milliseconds(column)
        if kind.tz is not None:
            return times
        zoned = pa.array(self.from_clocks(times.drop_null().to_numpy()))
        return pc.replace_with_mask(times, times.is_valid(), zoned) if times.null_count else zoned

    def from_clocks(self, local_ms: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the epoch milliseconds of times without a zone, which are milliseconds as if they were UTC."""
        self.has_zoneless = self.has_zoneless or bool(len(local_ms))
        return local_ms if self.zone is None else self.zone.epoch_ms(local_ms)

    def _per_second(self, numbers: npt.NDArray[Any]) -> int:
        """Return how many of the unit of numbers (n) are a second. Raises `InvalidArgument` as `decide` for any."""
        unit = self.decide(numbers[0].item())
        if self.is_guessed and not _may_count(unit, numbers).all():
            for other in _PER_SECOND.keys() - {unit}:
                if (is_other := _may_count(other, numbers)).any():
                    self.decide(numbers[is_other][0].item())
        return _PER_SECOND[unit]

    def _ms_of_integers(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        per = self._per_second(numbers)
        if per > 1000:
            return numbers // (per // 1000)
        if per == 1000:
            return numbers
        # numbers out of range stay out of range, and do not overflow
        return np.clip(numbers, -1, MAX_TIMESTAMP_MS + 1) * (1000 // per)

    def _ms_of_floats(self, numbers: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
        per = self._per_second(numbers)
        if not np.isfinite(numbers).all():
            raise InvalidArgument("a time is not finite")
        return np.clip(numbers * 1000 // per, -1, MAX_TIMESTAMP_MS + 1).astype(np.int64)

    def _ms_of_texts(self, texts: pa.Array) -> npt.NDArray[np.int64]:
        """Return the times of the texts of numbers. Integers are exact, others are floats as in `time_ms`."""
        is_integer = pc.match_substring_regex(texts, "^-?[0-9]+$")
        self.decide(float(texts[0].as_py()))
        zero = pa.scalar("0", texts.type)
        integers = pc.if_else(is_integer, texts, zero).cast(pa.int64()).to_numpy()
        if pc.all(is_integer).as_py():
            return self._ms_of_integers(integers)
        floats = pc.if_else(is_integer, zero, texts).cast(pa.float64()).to_numpy()
        choice = is_integer.to_numpy(zero_copy_only=False)
        return np.where(choice, self._ms_of_integers(integers), self._ms_of_floats(floats))

    def topic_of(self, member: Any) -> str:
        """Return the topic of a row by the member at its path. Raises `InvalidArgument`."""
        texts = [] if isinstance(member, list) else list(key_texts(key_value(member)))
        if not texts:
            raise InvalidArgument(f"no topic at {self.topic}")
        return self._checked(texts[0])

    def _checked(self, topic: str) -> str:
        if check_topic(topic) in self.of_others:
            raise InvalidArgument(f"topic {topic!r:.80} has entries of another connector, and a topic has one")
        return topic

    def topics_of(self, values: Sequence[Any] | pa.Array) -> pa.DictionaryArray | None:
        """Return the topics of rows; None: one of them must be read by itself."""
        # a topic 0 may be -0
        if (column := key_column(values, lambda rows: True)) is None or column.null_count:
            return None
        topics = column.dictionary_encode()
        try:
            for topic in topics.dictionary.to_pylist():
                self._checked(topic)
        except InvalidArgument:
            return None
        return topics

    def has_key(self, members: Iterable[Any], key: str) -> bool:
        """Return whether a row has a key, by the members at its key paths. Other ones may be no valid keys."""
        for name, member in zip(self.key_names, members, strict=True):
            with contextlib.suppress(InvalidArgument):
                if any(named_key(name, text) == key for text in filter(None, key_texts(key_value(member)))):
                    return True
        return False

    def paths_of_keys(self, members: Iterable[Any]) -> dict[str, int]:
        """Return the distinct keys of a row, each with the number of its first path in `keys`.

        `members` are those at its key paths. Raises `InvalidArgument`.
        """
        keys = dict[str, int]()
        for number, (name, member) in enumerate(zip(self.key_names, members, strict=True)):
            for text in filter(None, key_texts(key_value(member))):
                keys.setdefault(named_key(name, text), number)
        for key in keys:
            try:
                units = len(key.encode("utf-16-le")) // 2
            except UnicodeEncodeError as error:
                raise InvalidArgument(f"a key is no valid Unicode: {key!r:.80}") from error
            if units > MAX_KEY_UNITS:
                raise InvalidArgument(f"a key has {units:,} UTF-16 code units; {MAX_KEY_UNITS:,} are allowed")
        return keys


def iso_time(text: str) -> str:
    """Return a time as ISO 8601 if it is one such as 29.11.2026 14:05 or 29/Nov/2026:14:05:06 +0100, else as it is."""
    if match := _DOTTED_TIME.fullmatch(text.strip()):
        day, month, year, hour, rest = match.groups()
        date = f"{year}-{month:0>2}-{day:0>2}"
        return date if hour is None else f"{date}T{hour:0>2}{rest}".replace(",", ".")
    if (match := _SERVER_TIME.fullmatch(text.strip())) and match[2] in _MONTHS:
        day, month, year, clock, zone = match.groups()
        return f"{year}-{_MONTHS.index(month) + 1:02}-{day}T{clock}{zone or ''}"
    return text


def no_key(file: object, path: str, fields: Sequence[str], *, is_list: bool) -> InvalidArgument:
    """Return the error that a key's field in a file is an object of `fields`, or a list of such objects."""
    what, mark = ("a list of objects", "[]") if is_list else ("an object", "")
    name = next(filter(str.isidentifier, fields), "id")
    return InvalidArgument(
        f"{file}: --key {path} is {what}, which is no key: name a field of it, such as --key {path}{mark}.{name}"
    )


def path_of(path: str) -> Any:
    """Return a compiled JMESPath. A text that is none, such as the name of a column with blanks, is the field itself.

    Raises `ConfigError` if jmespath is missing.
    """
    try:
        return compiled_path(path, path)
    except InvalidArgument:
        return compiled_path(json_text(path), path)


def _may_count(unit: Unit, number: Any) -> Any:
    """Return whether a number, or each of some (n), is a likely time in a unit."""
    first, end = (second * _PER_SECOND[unit] for second in LIKELY_SECONDS)
    return (number >= first) & (number < end)


def _one_type(values: Sequence[Any]) -> pa.Array:
    """Return values as an array. Texts, if some are integers and some the texts of other numbers."""
    try:
        return pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        if not {*map(type, values)} <= {int, str}:
            raise
        return pa.array([*map(str, values)])


def key_column(
    values: Sequence[Any] | pa.Array,
    may_be_minus_zero: Callable[[npt.NDArray[np.int64]], bool] = lambda rows: False,
    name: str = "",
) -> pa.Array | None:
    """Return the keys of rows, one a row, as texts with nulls; None: rows must be read by themselves.

    `may_be_minus_zero` gets the numbers of rows whose key is 0, and says whether the text of one of them is -0. `name`
    is that of the keys, as of `split_name`.
    """
    if (column := _text_column(values, may_be_minus_zero, MAX_KEY_UNITS - len(name))) is None or not name:
        return column
    return pc.binary_join_element_wise(pa.scalar(name, KEY_TYPE), column, pa.scalar("", KEY_TYPE))


def _text_column(
    values: Sequence[Any] | pa.Array, may_be_minus_zero: Callable[[npt.NDArray[np.int64]], bool], most_units: int
) -> pa.Array | None:
    """Return values as texts, as `key_column`, of at most so many UTF-16 code units."""
    try:
        if isinstance(values, pa.Array):
            column = values
        else:
            # texts are not inspected first, and not copied to longer offsets then
            are_texts = {*map(type, values)} <= {str, type(None)}
            column = pa.array(values, KEY_TYPE if are_texts else None)
        if pa.types.is_null(column.type):
            return pa.nulls(len(column), KEY_TYPE)
        if pa.types.is_integer(column.type):
            if pc.any(is_zero := pc.equal(column, 0).fill_null(False)).as_py():
                zeros = np.flatnonzero(is_zero.to_numpy(zero_copy_only=False))
                if may_be_minus_zero(zeros):
                    return None
            return column.cast(KEY_TYPE)
        if pa.types.is_boolean(column.type):
            return column.cast(KEY_TYPE)
        if not is_text(column.type):
            return None
        column = plain_text(column)
        sizes = pc.min_max(pc.binary_length(column)).as_py()
        if (sizes["max"] or 0) > most_units:
            return None
        if sizes["min"] == 0:
            column = pc.if_else(pc.equal(column, "").fill_null(False), pa.scalar(None, KEY_TYPE), column)
        return column
    except (pa.ArrowException, OverflowError, UnicodeEncodeError):
        return None
