"""Extracts the keys of records: the record's key, headers, fields of its value, or the results of a function.

Threads: any thread may call `of`; only one may call the methods that count: `take`, `take_parts`, `plain_keys`. One
thread at a time calls a function.
"""

from __future__ import annotations

import contextlib
import struct
import threading
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tiered_index.connectors import json_numbers
from tiered_index.connectors.json_paths import FieldReader, Unclear, compiled_path, key_texts, searched
from tiered_index.connectors.kafka.record import KafkaRecord
from tiered_index.errors import InvalidArgument, listed
from tiered_index.format.keys.spelling import key_text, named_key, split_name
from tiered_index.types import MAX_KEY_UNITS

KeyFunction = Callable[[KafkaRecord], Iterable[str]]
Headers = Sequence[tuple[str, bytes | None]]
Spell = Callable[[bytes], str]
NAMED = 10
FUNCTION = "function"
"""In place of the rules of an index or a file whose keys a function gave."""
# the types of Kafka's serializers of numbers, which are big-endian
_NUMBERS = {"int16": ">i2", "int32": ">i4", "int64": ">i8", "float32": ">f4", "float64": ">f8"}
_FORMATS = {"int16": ">h", "int32": ">i", "int64": ">q", "float64": ">d"}
TYPES = (*_NUMBERS, "uuid")
"""The types of `--key key:TYPE` and `--key header:NAME:TYPE`."""
# such a short text has fewer UTF-16 code units than a key may have
_SURE_BYTES = MAX_KEY_UNITS
# a document with Confluent's schema id has five bytes before it
_FRAME_BYTES = 5
# most names of headers or members that a reason for no entries shows
_SEEN = 20


def _is_usable(key: str) -> bool:
    if key.isascii():
        return 0 < len(key) <= MAX_KEY_UNITS
    try:
        return 0 < len(key.encode("utf-16-le")) // 2 <= MAX_KEY_UNITS
    except UnicodeEncodeError:  # half a character, which JSON can have
        return False


def _number_text(kind: str, data: bytes) -> str:
    """Return the decimal text of a serialized number; of other bytes as `key_text`."""
    if len(data) != np.dtype(_NUMBERS[kind]).itemsize:
        return key_text(data)
    if kind == "float32":
        return str(np.frombuffer(data, _NUMBERS[kind])[0])
    return str(struct.unpack(_FORMATS[kind], data)[0])


def _uuid_text(data: bytes) -> str:
    """Return the text of a UUID of 16 bytes, or the canonical one of its text; of other bytes as `key_text`."""
    with contextlib.suppress(ValueError):
        return str(uuid.UUID(bytes=data) if len(data) == 16 else uuid.UUID(data.decode("ascii")))
    return key_text(data)


def _spell(kind: str) -> Spell:
    return _uuid_text if kind == "uuid" else partial(_number_text, kind)


@dataclass
class RecordKeys:
    """Extracts keys from records, by `--key` or by a function.

    A rule is ``key``, ``header:NAME`` or ``json:JMESPATH``. ``key:TYPE`` and ``header:NAME:TYPE`` are for bytes of
    Kafka's serializers: int16, int32, int64, float32, float64 and uuid give decimal or canonical text. Bytes of another
    length are spelled as without the type. A rule may begin with a name, as in ``order=json:id``: its keys are
    ``order=`` and the text.

    Empty keys and keys of more than 32,767 UTF-16 code units are skipped. `too_long` counts the latter. `without_key`
    counts records without a key, except those that only have keys that are too long; `no_json` counts records whose
    value should be JSON and is not. `no_json_first` has the places of the first of these.
    """

    rules: Sequence[str] = ("key",)
    function: KeyFunction | None = None
    without_key: int = 0
    too_long: int = 0
    no_json: int = 0
    no_json_first: list[str] = field(default_factory=list)
    # False: the rules of an index or a file, where one may find no key
    are_new: bool = field(default=True, kw_only=True)
    # the source and the archiver call the function, which may not be safe for threads
    _calling: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # each with the name of its keys, as of `split_name`
        self._key_spells: list[tuple[str, Spell]] = []
        self._headers: list[tuple[str, str, Spell]] = []
        self._paths: list[tuple[str, str, Any]] = []
        # until a record has a key: the records that were looked at, and what they have in place of one
        self._looked_at: int | None = 0
        self._seen: dict[str, set[str]] = {"header": set(), "member": set()}
        self._objects: set[str] = set()
        if self.function is not None:
            self.rules = (FUNCTION,)
            return
        for text in self.rules:
            of_keys, rule = split_name(text)
            kind, _, name = rule.partition(":")
            if rule == "key":
                self._key_spells.append((of_keys, key_text))
            elif kind == "key" and name in TYPES:
                self._key_spells.append((of_keys, _spell(name)))
            elif kind == "header" and name:
                header, _, of_type = name.rpartition(":")
                typed = bool(header) and of_type in TYPES
                self._headers.append((of_keys, header, _spell(of_type)) if typed else (of_keys, name, key_text))
            elif kind == "json" and name:
                self._paths.append((of_keys, name, compiled_path(name, f"--key {text}", check=self.are_new)))
            else:
                raise InvalidArgument(
                    f"--key {text}: give key, header:NAME or json:PATH, such as json:order.id; key and header:NAME may "
                    f"end with a type: {', '.join(f':{kind}' for kind in TYPES)}; a name of the keys may be before "
                    "each, such as order=json:order.id"
                )
        self._fields = FieldReader.of([path for *_, path in self._paths], [of_keys for of_keys, *_ in self._paths])

    @classmethod
    def by_rules(cls, rules: Iterable[str]) -> Self:
        """Return the extraction by the rules of an index and its files, without that of a function."""
        return cls(tuple({*rules} - {FUNCTION}) or ("key",), are_new=False)

    @property
    def has_found(self) -> bool:
        """Whether a record had a key."""
        return self._looked_at is None

    @property
    def needs(self) -> tuple[bool, bool]:
        """Whether the keys need a record's headers, and its value."""
        return bool(self._headers), bool(self._paths)

    @property
    def only_key(self) -> bool:
        """Whether the record's key, in one form, is its only key in the index."""
        return len(self._key_spells) == 1 and not self._headers and not self._paths

    def plain_keys(self, record_keys: pa.BinaryArray) -> pa.Array | None:
        """Return the keys of records with these keys, one a record; None: call `take_parts` for each record.

        Arrow makes texts of all at once: most keys are short texts, or numbers of one length. Memory: the keys twice.
        """
        if not len(record_keys) or record_keys.null_count or not self.only_key:
            return None
        name, spell = self._key_spells[0]
        _, offsets, data = record_keys.buffers()
        lengths = np.diff(np.frombuffer(offsets, np.int32)[: len(record_keys) + 1])
        units = np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8)
        texts = None
        if isinstance(spell, partial) and (lengths == np.dtype(dtype := _NUMBERS[spell.args[0]]).itemsize).all():
            numbers = units.view(dtype)
            is_float = numbers.dtype.kind == "f"
            texts = pa.array(map(str, numbers.tolist()) if is_float else numbers.astype(np.int64))
            # the text of a float of 32 bits is shorter than that of its double
            texts = None if is_float and numbers.itemsize == 4 else texts.cast(pa.string())
        elif spell is key_text and lengths.min() > 0 and lengths.max() <= _SURE_BYTES - len(name):
            # a key with a control character is spelled by its digits; memory: 2 bytes a byte
            has_control = bool(((units < 0x20) | (units == 0x7F)).any())
            with contextlib.suppress(pa.ArrowInvalid):
                texts = None if has_control else record_keys.cast(pa.string())
        if texts is not None:
            self._looked_at = None
            texts = pc.binary_join_element_wise(name, texts, "") if name else texts
        return texts

    @property
    def only_path(self) -> bool:
        """Whether the only key of a record is a plain path of its value."""
        return len(self._paths) == 1 and not self._key_spells and not self._headers and self._fields is not None

    def take_text(self, value: bytes | None) -> str | None:
        """Return the key of a value by the `only_path`; None: call `take_parts`. It is quick for short texts."""
        if value is None or self._fields is None or (text := self._fields.only_text(value)) is None:
            return None
        self._looked_at = None if 0 < len(text) <= MAX_KEY_UNITS else self._looked_at
        return text if 0 < len(text) <= MAX_KEY_UNITS else None

    def take(self, record: KafkaRecord) -> list[str]:
        """Return the keys of a record as `of` does, and count missing keys and invalid JSON."""
        if self.function is not None:
            keys = self._counted(self._of_function(self.function, record))
            self._looked_at = None if keys or self._looked_at is None else self._looked_at + 1
            return keys
        place = f"{record.topic}/{record.partition}/{record.offset}"
        return self.take_parts(record.key, record.headers, record.value, lambda: place)

    def take_parts(
        self, key: bytes | None, headers: Headers, value: bytes | None, place: Callable[[], str]
    ) -> list[str]:
        """As `take`, for the parts of a record; those that `needs` leaves out may be empty."""
        spelled, is_json = self._of_parts(key, headers, value)
        keys = self._counted(spelled)
        if not is_json:
            self.no_json += 1
            if len(self.no_json_first) < NAMED:
                self.no_json_first.append(place())
        if keys:
            self._looked_at = None
        elif self._looked_at is not None:
            self._note_lack(headers, value)
        return keys

    def of(self, record: KafkaRecord) -> list[str]:
        """Return the distinct keys of a record."""
        if self.function is not None:
            spelled = self._of_function(self.function, record)
        else:
            spelled, _ = self._of_parts(record.key, record.headers, record.value)
        return [key for key in dict.fromkeys(spelled) if _is_usable(key)]

    def _of_function(self, function: KeyFunction, record: KafkaRecord) -> list[str]:
        try:
            with self._calling:
                return list(function(record))
        except Exception as error:
            place = f"{record.topic}/{record.partition}/{record.offset}"
            raise InvalidArgument(f"record {place}: the function of keys failed: {error!r}") from error

    def _counted(self, spelled: list[str]) -> list[str]:
        if len(spelled) == 1 and _is_usable(spelled[0]):
            return spelled
        keys = [key for key in dict.fromkeys(spelled) if _is_usable(key)]
        # a character has two UTF-16 code units at most
        too_long = sum(len(key) * 2 > MAX_KEY_UNITS and not _is_usable(key) for key in spelled)
        self.too_long += too_long
        self.without_key += not keys and not too_long
        return keys

    def _of_parts(self, key: bytes | None, headers: Headers, value: bytes | None) -> tuple[list[str], bool]:
        """Return the keys of a record, and false if its value should be JSON and is not."""
        spelled = [named_key(name, spell(key)) for name, spell in self._key_spells] if key is not None else []
        for name, wanted, spell in self._headers:
            spelled += [
                named_key(name, spell(data)) for header, data in headers if header == wanted and data is not None
            ]
        if self._paths and value is not None:
            of_value, is_json = self._of_value(value)
            return spelled + of_value, is_json
        return spelled, True

    def _of_value(self, value: bytes) -> tuple[list[str], bool]:
        if self._fields is not None:
            with contextlib.suppress(Unclear):
                return self._fields.keys_of(value[_FRAME_BYTES:] if value[:1] == b"\0" else value), True
        document = _document(value)
        if document is None:
            return [], False
        texts = []
        for name, _, path in self._paths:
            # Python makes no text of so many digits, and none of an expression of JMESPath
            with contextlib.suppress(ValueError, TypeError):
                texts += [named_key(name, text) for text in key_texts(searched(path, document[0]))]
        return texts, True

    def _note_lack(self, headers: Headers, value: bytes | None) -> None:
        """Note the members of a record that gave no key."""
        assert self._looked_at is not None
        self._looked_at += 1
        if len(self._seen["header"]) < _SEEN:
            self._seen["header"].update(name for name, _ in headers)
        if not self._paths or len(self._seen["member"]) >= _SEEN or (document := _document(value)) is None:
            return
        if isinstance(document[0], dict):
            self._seen["member"].update(document[0])
        for _, name, path in self._paths:
            with contextlib.suppress(Exception):
                if isinstance(path.search(document[0]), dict):
                    self._objects.add(name)

    def lacks(self, records: int) -> list[str]:
        """Return why none of the `records` that were read has a key; empty: some have one."""
        if not self._looked_at:
            return []
        none = f"none of {records:,} records"
        if self.function is not None:
            return [f"{none} has a key by the function of this run"]
        texts = []
        if self._key_spells:
            texts.append(f"{none} has a key of 1 to {MAX_KEY_UNITS:,} characters")
        for _, name, _ in self._headers:
            texts.append(f"{none} has header {name}; seen: {self._shown('header')}")
        for _, name, _ in self._paths:
            has = f"{none} has a text or number at {name}"
            if name in self._objects:
                texts.append(f"{has}, which is an object: name a member of it, such as {name}.id")
            else:
                texts.append(f"{has}; members seen: {self._shown('member')}")
        return texts

    def _shown(self, kind: str) -> str:
        return listed(sorted(self._seen[kind]), _SEEN) or "none"


def _document(value: bytes | None) -> tuple[Any] | None:
    """Return the document in a value, also behind the id of its schema; None: it is not JSON."""
    if value is None:
        return None
    for begin in (0, _FRAME_BYTES) if value[:1] == b"\0" else (0,):
        with contextlib.suppress(ValueError, RecursionError):
            return (json_numbers.loads(value[begin:]),)
    return None
