"""Encodes answers: JSON, NDJSON with the status as its last line, or an Arrow stream with the status in its last batch.

The documents are those of the library (`to_dict`), without local paths. An answer that breaks off has no status, so
that it can't be mistaken for a whole one. Functions are pure; use one `ArrowStream` for each answer.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import Any

import orjson
import pyarrow as pa

from tiered_index.base.encoding import ARROW, COLUMNS, JSON, NDJSON, STATUS, json_text, plain
from tiered_index.format.schema import Schema
from tiered_index.server.http.problems import Redaction
from tiered_index.service.read.answers.results import QueryResults
from tiered_index.types import QueryResult, TopicsResult, describe_places

__all__ = ["ARROW", "COLUMNS", "JSON", "NDJSON"]
# Members of an answer that may have local paths
_PLACES = ("failed", "explain", "freshness", "lost")
# Most entries of a piece of a batch, or rows of a piece of a list
ROWS = 8192
# Most bytes that the columns of a page's entries have as JSON
PAGE_BYTES = 8 << 20
# Members of most answers of a batch. Shared by all of them: for encoding only
_COMPLETE: dict[str, Any] = {
    "status": "complete",
    "cursor": None,
    "unknown_topics": [],
    "expired_before_ms": None,
    "replaced": 0,
}


def form_of(accept: str | None) -> str:
    """Return the first supported media type of an Accept header, else JSON."""
    for part in (accept or "").split(","):
        kind = part.partition(";")[0].strip().lower()
        if kind in (JSON, NDJSON, ARROW):
            return kind
    return JSON


def encode(document: Any) -> bytes:
    """Return a document as one line of JSON in printable ASCII."""
    try:
        data = orjson.dumps(document, plain, orjson.OPT_PASSTHROUGH_DATACLASS)
    except TypeError:
        # half a surrogate pair: not ASCII, so that `json_text` encodes it
        data = b"\x80"
    return (data.replace(b"\x7f", b"\\u007f") if data.isascii() else json_text(document, compact=True).encode()) + b"\n"


@functools.lru_cache(maxsize=64)
def columns_of(item_type: Any) -> str:
    """Return the value of the header `COLUMNS` for a class of entries."""
    schema = Schema.of(item_type)
    columns = [[c.name, c.served_type, c.identity] for c in schema.extra]
    return json_text({"name": schema.name, "columns": columns}, compact=True)


@functools.lru_cache(maxsize=64)
def most_entries(item_type: Any) -> int:
    """Return the most entries of a class whose columns have at most `PAGE_BYTES` as JSON, at least 1."""
    # the hexadecimal digits of bytes are twice as long
    return max(1, PAGE_BYTES // (2 * Schema.of(item_type).row.itemsize))


def answer_document(answer: QueryResult | TopicsResult, redaction: Redaction, *, files: bool) -> dict[str, Any]:
    """Return an answer's document. With `files`, `explain` reports each file."""
    document = answer.to_dict(files=files)
    if redaction.stand_ins:
        redacted = [name for name in _PLACES if document[name] and (name != "explain" or files)]
        document |= {name: redaction.document(document[name]) for name in redacted}
        items = document.get("items", ())
        if items and "source" in items[0]:
            document["items"] = [{**item, "source": redaction.text(item["source"])} for item in items]
    return document


def list_document(document: dict[str, Any], name: str, form: str) -> bytes | Iterator[bytes]:
    """Return a document whose member `name` is an iterable of documents; of more than `ROWS`, as an iterator of pieces.

    As NDJSON the document itself is the last line.
    """
    rows = iter(document.pop(name))
    first = list(islice(rows, ROWS))
    pieces = _pieces(name, chain([first], iter(lambda: list(islice(rows, ROWS)), [])), document, form)
    return pieces if len(first) == ROWS else b"".join(pieces)


def _pieces(name: str, lists: Iterable[list[Any]], rest: dict[str, Any], form: str) -> Iterator[bytes]:
    """Yield the document `rest` with the member `name`, made of `lists`, in pieces. NDJSON ends with `rest`."""
    yield b"" if form == NDJSON else b'{"%s":[' % name.encode()
    for number, documents in enumerate(lists):
        # of a list without its brackets
        yield (
            b"".join(map(encode, documents)) if form == NDJSON else (b"," if number else b"") + encode(documents)[1:-2]
        )
    yield encode(rest) if form == NDJSON else b"]," + encode(rest)[1:]


def piece_rows(results: QueryResults) -> int:
    """Return the most entries of a piece of a batch."""
    item_type: Any = results.item_type
    return min(ROWS, most_entries(item_type))


def batch_pieces(results: QueryResults, redaction: Redaction, totals: dict[str, Any], form: str) -> Iterator[bytes]:
    """Yield a batch's answers in the order of the lookups, in pieces of at most `piece_rows`, then its `totals`."""
    if form != ARROW:
        yield from _pieces("results", _answers(results, redaction), totals, form)
        return
    stream, table, most = ArrowStream(), table_of(results, redaction), piece_rows(results)
    for at in range(0, max(1, len(table)), most):
        yield stream.table(table.slice(at, most))
    yield stream.end(totals)


def _answers(results: QueryResults, redaction: Redaction) -> Iterator[list[dict[str, Any]]]:
    """Yield the documents of the answers of a batch, of at most `piece_rows` entries at a time."""
    begin, ends, most = 0, results.counts.cumsum(), piece_rows(results)
    while begin < len(results):
        before = int(ends[begin - 1]) if begin else 0
        # one lookup has at most a page of entries
        end = max(begin + 1, int(ends.searchsorted(before + most, "right")))
        yield _batch_answers(results, redaction, begin, end)
        begin = end


def _batch_answers(results: QueryResults, redaction: Redaction, begin: int, end: int) -> list[dict[str, Any]]:
    """Return the documents of the answers from `begin` to before `end`, to be encoded."""
    documents = results.item_documents(begin, end)
    if redaction.stand_ins and "source" in next(chain.from_iterable(documents), ()):
        for item in chain.from_iterable(documents):
            item["source"] = redaction.text(item["source"])
    answers = [{"items": items, **_COMPLETE} for items in documents]
    for at in (~results.is_plain[begin:end]).nonzero()[0].tolist():
        result = results[begin + at]
        answers[at] |= {name: getattr(result, name) for name in ("status", "cursor", "expired_before_ms", "replaced")}
        answers[at]["unknown_topics"] = list(result.unknown_topics)
        if result.failed:
            answers[at]["failed"] = redaction.document([report.to_dict() for report in result.failed])
        if result.lost:
            answers[at]["lost"] = redaction.document([file.to_dict() for file in result.lost])
    return answers


def batch_totals(results: QueryResults, redaction: Redaction, *, files: bool) -> dict[str, Any]:
    """Return the fields that apply to a whole batch.

    `cursors` has the cursors of truncated answers by the lookup's number, `partial` the numbers of partial answers.
    """
    truncated = results.more.nonzero()[0].tolist()
    return {
        "status": "partial" if results.failed else "truncated" if truncated else "complete",
        "cursors": {str(number): results[number].cursor for number in truncated},
        "partial": [number for number, result in enumerate(results) if result.failed] if results.failed else [],
        "failed": redaction.document([report.to_dict() for report in results.failed]),
        "explain": redaction.document(results.explain.to_dict(files=files)),
        **redaction.document(results.seen.to_dict()),
        "timestamp_resolution_ms": QueryResult.timestamp_resolution_ms,
    }


def table_of(answer: QueryResult | QueryResults, redaction: Redaction) -> pa.Table:
    """Return the entries of an answer or a batch as one table (`to_arrow`), without local paths."""
    table = answer.to_arrow()
    if not redaction.stand_ins or table["source"].null_count == len(table):
        return table
    sources = [None if source is None else redaction.text(source) for source in table["source"].to_pylist()]
    return table.set_column(table.column_names.index("source"), "source", pa.array(sources, pa.string()))


@functools.lru_cache(maxsize=16)
def _no_rows(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema)


class ArrowStream:
    """An Arrow IPC stream, made piece by piece."""

    def __init__(self) -> None:
        self._schema: pa.Schema | None = None

    def table(self, table: pa.Table) -> bytes:
        """Return the bytes of a table in the stream."""
        begin = [] if self._schema is not None else [table.schema.serialize()]
        self._schema = table.schema
        # no writer into a file object: Arrow waits for the GIL at each of its writes
        return b"".join(begin + [batch.serialize() for batch in table.to_batches()])

    def end(self, status: Mapping[str, Any]) -> bytes:
        """Return the end of the stream: an empty last batch with the status."""
        schema = self._schema if self._schema is not None else pa.schema([])
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, schema) as writer:
            writer.write_batch(_no_rows(schema), custom_metadata={STATUS: encode(dict(status)).strip()})
        begun_bytes = schema.serialize().size if self._schema is not None else 0
        data: bytes = sink.getvalue()[begun_bytes:].to_pybytes()
        return data


def item_documents(answer: QueryResult, redaction: Redaction) -> Iterator[dict[str, Any]]:
    """Yield an answer's entries as documents."""
    documents = [item.to_dict() for item in answer.items]
    describe_places(documents, answer.places)
    for item, document in zip(answer.items, documents, strict=True):
        yield document | {"source": redaction.text(item.source)} if item.source is not None else document
