"""The schema of entries: their columns, as NumPy dtypes and as the declaration in every file. Pure.

The first six columns are RocketMQ's. The columns of a subclass follow in order of declaration. *Identity* columns
decide whether two entries are the same answer.
"""

from __future__ import annotations

import dataclasses
import inspect
import keyword
from collections.abc import Collection, Mapping
from functools import cached_property, lru_cache
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta, Struct

from tiered_index.base.documents import reader_of
from tiered_index.base.kernels import compiled_views
from tiered_index.errors import ConfigError, SchemaMismatch
from tiered_index.types import IndexItem, KeyedIndexItem, Lookup, Provenance, QueryResult, column

PREVIOUS = "previous"
# The type of text. Bytes have no byte order, so a version without text reads such a column as bytes. It never writes
# this type for bytes, and keeps it when it merges files.
_TEXT = ">S"


class Column(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One stored column: its name, its big-endian NumPy type string, and whether it is part of the identity.

    Bytes are ``|Sn``, text is ``>Sn``. To NumPy both are the same type: bytes, filled with NUL.
    """

    # `item_type` makes a class with these names, so Python's special names are excluded
    name: Annotated[str, Meta(pattern=r"\A(?!__).{1,255}\Z")]
    dtype: Annotated[str, Meta(pattern=r"\A[>|]?[iufS][0-9]{1,9}\Z")]
    identity: bool = False

    @property
    def is_text(self) -> bool:
        """Whether values are text, stored as UTF-8."""
        return self.dtype.startswith(_TEXT)

    @property
    def served_type(self) -> str:
        """The type as a service declares it: ``textN`` for text, which clients of versions without text refuse."""
        return f"text{self.dtype.removeprefix(_TEXT)}" if self.is_text else self.dtype

    @classmethod
    def served(cls, name: str, served_type: str, identity: bool) -> Column:
        """Return the column that a service declares; its type is a `served_type`."""
        is_text = served_type.startswith("text")
        return cls(name, f"{_TEXT}{served_type.removeprefix('text')}" if is_text else served_type, identity)

    @property
    def spoken_type(self) -> str:
        """The type, for people."""
        return f"text of at most {self.dtype.removeprefix(_TEXT)} bytes" if self.is_text else self.dtype


BASE_COLUMNS = (
    Column("key_hash", ">i4"),
    Column("topic_id", ">i4"),
    Column("queue_id", ">i4", identity=True),
    Column("offset", ">i8", identity=True),
    Column("size", ">i4"),
    Column("time_diff_s", ">i4"),
)
_NOT_STORED = {"topic", "second", "timestamp_ms", "keys", "key", "source", "source_position"}
_FORMATS = dict(zip(["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"], "bhiqBHIQefd", strict=True))
_RESERVED = {c.name for c in BASE_COLUMNS} | {PREVIOUS} | _NOT_STORED
# in the order of tables: fields of a lookup, of an answer, of its messages
_TABLE_FIELDS = "lookup _lookup position entries to_dict as_of_ms error message_state message_body message_tags"
_TABLE_FIELDS += " message_properties message_problem"
ANSWER_FIELDS = frozenset(
    [
        *_TABLE_FIELDS.split(),
        *Provenance._fields,
        *(f.name for kind in (Lookup, QueryResult) for f in dataclasses.fields(kind)),
    ]
)
"""Names that answers have in JSON, streams and tables beside the columns of entries."""


def struct_format(dtype: np.dtype[Any]) -> str:
    """Return the `struct` format of a column's type."""
    return f"{dtype.itemsize}s" if dtype.kind == "S" else _FORMATS[f"{dtype.kind}{dtype.itemsize}"]


def of_width(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the type for reading a column at its full width: V in place of S. Other types are unchanged."""
    return np.dtype(f"V{dtype.itemsize}") if dtype.kind == "S" else dtype


def listed(values: np.ndarray[Any, np.dtype[Any]]) -> list[Any]:
    """Return the values of a stored column as a list; bytes have their full width."""
    return list(values.astype(of_width(values.dtype), copy=False).tolist())


def texts(values: np.ndarray[Any, np.dtype[Any]]) -> list[str]:
    """Return the values of a stored text column (of kind S or V) as a list of texts."""
    # kind S ends a value before the NUL bytes at its end
    return [value.decode(errors="replace") for value in values.view(f"S{values.dtype.itemsize}").tolist()]


def text_of(value: bytes) -> str:
    """Return the text of a stored value. Bytes that are not UTF-8 become U+FFFD."""
    return value.rstrip(b"\0").decode(errors="replace")


def _declared(owner: type) -> set[str]:
    """Return the names of the fields that a class declares, even if it is not a dataclass."""
    named = {name for name, value in vars(owner).items() if isinstance(value, dataclasses.Field)}
    if not issubclass(owner, IndexItem):
        # annotations of a mixin are not fields
        return named
    return named | {name for name, kind in inspect.get_annotations(owner).items() if "ClassVar" not in str(kind)}


class _Declared(Struct):
    """A schema as stored."""

    name: Annotated[str, Meta(pattern=r"\A[^\0]{1,255}\Z")]
    columns: tuple[Column, ...]


class Schema:
    """The declared columns of entries. `extra` are the columns after `BASE_COLUMNS`. Immutable."""

    def __init__(self, name: str, extra: tuple[Column, ...] = ()) -> None:
        self.name, self.extra = name, extra
        # computed once, because each lookup uses a schema as a key
        self._hash = hash((name, extra))
        seen = set(_RESERVED)
        for c in self.extra:
            if not c.name.isidentifier() or keyword.iskeyword(c.name) or c.name in seen:
                raise ConfigError(
                    f"schema {self.name}: column {c.name!r} must be a Python identifier that no other column has"
                )
            seen.add(c.name)
            try:
                dtype = np.dtype(c.dtype)
            except (TypeError, ValueError, SyntaxError) as error:
                raise ConfigError(f"schema {self.name}: column {c.name!r} has no such type {c.dtype!r}") from error
            if dtype.kind not in "iufS" or dtype.itemsize == 0 or dtype.shape or dtype.byteorder in ("<", "="):
                raise ConfigError(
                    f"schema {self.name}: column {c.name!r} needs a big-endian fixed-width type such as '>u4' or "
                    f"'S16', not {c.dtype!r}"
                )
            if dtype.kind == "f" and dtype.itemsize > 8:
                raise ConfigError(f"schema {self.name}: column {c.name!r} has more than 8 bytes: declare it as '>f8'")
            if c.identity and dtype.kind not in "iu":
                raise ConfigError(f"schema {self.name}: identity column {c.name!r} must be an integer, not {c.dtype!r}")

    @classmethod
    def of(cls, item_type: type[IndexItem]) -> Schema:
        """Return the schema that `item_type` declares.

        Raises `ConfigError` for a field without `column(...)`, for a field that is declared twice, and for fields in a
        class that is not a dataclass.
        """
        base = {f.name for f in dataclasses.fields(IndexItem)}
        for owner in item_type.__mro__[: item_type.__mro__.index(IndexItem)]:
            own = _declared(owner)
            if own and "__dataclass_fields__" not in vars(owner):
                raise ConfigError(
                    f"{owner.__name__} has fields of its own and is not a dataclass: put @dataclass(frozen=True) "
                    f"above it"
                )
            for parent in filter(dataclasses.is_dataclass, owner.__mro__[1:]):
                for f in dataclasses.fields(parent):
                    if f.name in own:
                        raise ConfigError(f"{owner.__name__}.{f.name} is a field of {parent.__name__} already")
        extra = []
        for f in dataclasses.fields(item_type):
            if f.name in base:
                continue
            if "dtype" not in f.metadata:
                raise ConfigError(f"{item_type.__name__}.{f.name} is not declared with column(...)")
            dtype = np.dtype(f.metadata["dtype"])
            stored = f"{_TEXT}{dtype.itemsize}" if f.metadata.get("text") else dtype.newbyteorder(">").str
            extra.append(Column(f.name, stored, bool(f.metadata["identity"])))
        return _shared(item_type.__name__, tuple(extra))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Schema):
            return NotImplemented
        return self is other or (self.name, self.extra) == (other.name, other.extra)

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"Schema(name={self.name!r}, extra={self.extra!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _shared, (self.name, self.extra)

    @cached_property
    def item(self) -> np.dtype[Any]:
        """Packed dtype of a compacted item (28 bytes for `IndexItem`, 32 for `KeyedIndexItem`)."""
        return np.dtype([(c.name, c.dtype) for c in (*BASE_COLUMNS, *self.extra)])

    @cached_property
    def entry(self) -> np.dtype[Any]:
        """Packed dtype of an unsealed entry: the item and `previous`."""
        return np.dtype([(c.name, c.dtype) for c in (*BASE_COLUMNS, *self.extra)] + [(PREVIOUS, ">i4")])

    @cached_property
    def row(self) -> np.dtype[Any]:
        """Dtype of an answer's row: native byte order, and the epoch `second` in place of `time_diff_s`.

        Bytes are of kind V, because NumPy drops NUL bytes at the end of kind S.
        """
        columns = [("second", "i8"), *((c.name, c.dtype) for c in (*BASE_COLUMNS, *self.extra))]
        stored = [(name, of_width(np.dtype(dtype))) for name, dtype in columns if name != "time_diff_s"]
        return np.dtype([(name, dtype.newbyteorder("=").str) for name, dtype in stored])

    @cached_property
    def no_rows(self) -> np.ndarray[Any, np.dtype[Any]]:
        """An empty array of rows."""
        return np.empty(0, self.row)

    @cached_property
    def keyed(self) -> bool:
        """Whether entries have the fingerprint of the key."""
        return any(c.name == "fingerprint" and c.dtype == ">u4" for c in self.extra)

    @cached_property
    def identity_extra(self) -> tuple[str, ...]:
        """The names of the extra identity columns, in order of declaration."""
        return tuple(c.name for c in self.extra if c.identity)

    def clashing(self, names: Collection[str] = ANSWER_FIELDS) -> str | None:
        """Return the first extra column whose name, in lower case, is one of `names`; None: there is none."""
        return next((c.name for c in self.extra if c.name.lower() in names), None)

    @cached_property
    def text_columns(self) -> frozenset[str]:
        """The names of the text columns."""
        return frozenset(c.name for c in self.extra if c.is_text)

    @cached_property
    def caller_columns(self) -> tuple[Column, ...]:
        """The extra columns that a caller of `put` supplies: all but the fingerprint, which is computed."""
        return tuple(c for c in self.extra if c.name != "fingerprint")

    def to_json(self) -> dict[str, Any]:
        """Return the declaration as stored in files."""
        return {"name": self.name, "columns": [[c.name, c.dtype, c.identity] for c in (*BASE_COLUMNS, *self.extra)]}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Schema:
        """Return the schema of a stored declaration. Raises `SchemaMismatch` unless it begins with `BASE_COLUMNS`."""
        try:
            declared = reader_of(_Declared)(document)
        except msgspec.ValidationError as error:
            raise SchemaMismatch(f"not a schema declaration: {error}") from error
        if declared.columns[: len(BASE_COLUMNS)] != BASE_COLUMNS:
            raise SchemaMismatch(f"schema {declared.name!r} does not start with IndexItem's columns")
        return _shared(declared.name, declared.columns[len(BASE_COLUMNS) :])

    def item_type(self) -> type[IndexItem]:
        """Return a class of entries for this schema: a built-in class, or a new one from the declaration."""
        if self == ROCKETMQ_SCHEMA:
            return IndexItem
        if self == KEYED_SCHEMA:
            return KeyedIndexItem
        kinds = {"i": int, "u": int, "f": float, "S": bytes}
        fields: list[tuple[str, type, Any]] = []
        for c in self.extra:
            dtype = np.dtype(c.dtype)
            if c.is_text:
                fields.append((c.name, str, column("text", width=dtype.itemsize, identity=c.identity)))
            else:
                fields.append((c.name, kinds[dtype.kind], column(c.dtype, identity=c.identity)))
        return dataclasses.make_dataclass(self.name, fields, bases=(IndexItem,), frozen=True, kw_only=True)


def read_schema(_: type, declaration: Any) -> Schema:
    """Return the schema of a stored declaration: the hook of documents that have one. See `Schema.from_json`."""
    return Schema.from_json(declaration)


@lru_cache(maxsize=64)
def row_form(schema: Schema) -> Any:
    """Return the `RowForm` of a schema for the compiled core, which must be available.

    It is not part of the schema, because schemas are pickled for other processes.
    """
    core = compiled_views()
    assert core is not None
    fields: Mapping[str, Any] = schema.item.fields or {}
    extra = [np.dtype(c.dtype) for c in schema.extra]
    sizes = np.array([-dtype.itemsize if dtype.kind == "S" else dtype.itemsize for dtype in extra], np.int64)
    return core.RowForm(sizes, int(fields["fingerprint"][1]) if schema.keyed else 0)


@lru_cache(maxsize=1_024)
def _shared(name: str, extra: tuple[Column, ...]) -> Schema:
    """Return the schema of a declaration, always the same object, so that caches by schema need no comparison."""
    return Schema(name, extra)


ROCKETMQ_SCHEMA = Schema.of(IndexItem)
KEYED_SCHEMA = Schema.of(KeyedIndexItem)
