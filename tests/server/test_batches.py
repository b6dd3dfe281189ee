"""A batch by columns has the same answers as single lookups: as JSON, as lines, and as an Arrow stream."""

import dataclasses
import io
import json
import random

import httpx
import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.server.conftest import on_a_port, published, serving
from tests.support.batches import batch
from tiered_index import IndexReader, IndexService, KeyedIndexItem, Lookup
from tiered_index.base.encoding import STATUS
from tiered_index.client import IndexClient
from tiered_index.client.answers import decoded, table_of
from tiered_index.errors import StorageUnavailable
from tiered_index.server.http import wire
from tiered_index.server.http.problems import Redaction
from tiered_index.server.http.served import Caps
from tiered_index.types import FileReport, LostFile, Provenance, column

T = 1_700_000_000_000
HIDDEN = Redaction((("broker-", "[root]-"),))
REPORT = FileReport(file="f", place="storage", outcome="failed", begin_ms=T, end_ms=T + 60_000)
FAILED = dataclasses.replace(REPORT, error="/broker-a is away")
LOST = LostFile(file="g", begin_ms=T, end_ms=T, entries=3, source="memory://broker-a")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Marked(KeyedIndexItem):
    """An entry with columns for which JSON has no type."""

    mark: bytes = column("S4", default=b"")
    weight: float = column(">f8", default=0.0)


@pytest.fixture(scope="module", params=["native", "rocketmq", "marked", "several"])
def looked_up(request, tmp_path_factory):
    """The objects that answer a batch: an index of each kind of entries, or two indexes as one."""
    folder, names = tmp_path_factory.mktemp("batches"), ["broker-a", "broker-b"]
    uris = [(folder / name).as_uri() for name in names[: 2 if request.param == "several" else 1]]
    own = {"rocketmq": {"preset": "rocketmq"}, "marked": {"item_type": Marked}}.get(request.param, {})
    for number, uri in enumerate(uris):
        where = {"root": folder / str(number), "storage": uri}
        with IndexService.open(**where, slots=50, items=90, background=False, **own) as index:
            rng = random.Random(number)
            # duplicates, several files, times and offsets that rise together and that don't
            for start in range(0, 240, 60):
                some = np.array([rng.randrange(400) for _ in range(60)])
                columns = {"topic": [("t", "tö", "u")[n % 3] for n in some], "key": [f"k{n % 12}" for n in some]}
                columns["timestamp_ms"] = T + (some % 50 if start % 120 else some) * 1000
                if request.param == "marked":
                    columns |= {"mark": [b"\x01%d" % (n % 9) for n in some], "weight": some / 7}
                index.put_batch(batch(60, queue_id=some % 4, offset=some * 10, size=7, **columns))
                index.seal()
            index.run_lifecycle()
    with IndexReader.open(uris, **({"item_type": Marked} if request.param == "marked" else {})) as reader:
        yield reader


lookups = st.lists(
    st.builds(
        Lookup,
        topic=st.sampled_from(["t", "tö", "u", "nowhere"]),
        key=st.sampled_from([*(f"k{n}" for n in range(12)), "absent"]),
        begin_ms=st.sampled_from([None, T + 20_000]),
        end_ms=st.sampled_from([None, T + 200_000]),
        max_count=st.sampled_from([1, 3, 64]),
    ),
    min_size=1,
    max_size=12,
)


def expected(result, redaction):
    """Return a batch's text of one answer, made from its items."""
    whole = result.to_dict()
    said = {
        name: whole[name] for name in ("items", "status", "cursor", "unknown_topics", "expired_before_ms", "replaced")
    }
    said |= {name: whole[name] for name in ("failed", "lost") if whole[name]}
    said["items"] = [redaction.document(item) for item in said["items"]]
    said |= {name: redaction.document(said[name]) for name in ("failed", "lost") if name in said}
    return json.loads(wire.encode(said))


@settings(max_examples=25, deadline=None)
@given(
    searches=lookups,
    paged=st.booleans(),
    more=st.sampled_from(
        [
            {},
            {"failed": (FAILED,)},
            {"failed": (FAILED,), "lacking": {(FAILED.source, FAILED.file): {0}}},
            {"provenance": lambda freshness, unknown, *_, **__: Provenance(freshness, tuple(unknown), (LOST,))},
        ]
    ),
)
@pytest.mark.parametrize(("redaction", "rows_of_a_piece"), [(Redaction(), 8192), (HIDDEN, 5)])
def test_every_form_of_a_batch_has_the_same_answers(looked_up, searches, paged, more, redaction, rows_of_a_piece):
    if paged and (cursor := looked_up.query_many(searches)[0].cursor) is not None:
        searches = [*searches, dataclasses.replace(searches[0], cursor=cursor)]
    results = dataclasses.replace(looked_up.query_many(searches), **more)
    answers = [expected(result, redaction) for result in results]
    totals = wire.batch_totals(results, redaction, files=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "ROWS", rows_of_a_piece)
        document = json.loads(b"".join(wire.batch_pieces(results, redaction, totals, wire.JSON)))
        lines = b"".join(wire.batch_pieces(results, redaction, totals, wire.NDJSON)).splitlines()
        data = b"".join(wire.batch_pieces(results, redaction, totals, wire.ARROW))
    *listed, last = map(json.loads, lines)
    assert {"results": listed} | last == document
    assert document["results"] == answers
    # the document of a single lookup has the same entries
    for search, answer in zip(searches, answers, strict=True):
        alone = looked_up.query(
            search.topic, search.key, search.begin_ms, search.end_ms, search.max_count, search.cursor
        )
        items = json.loads(wire.encode(wire.answer_document(alone, redaction, files=False)))["items"]
        assert items == answer["items"]
    batches = list(pa.ipc.open_stream(io.BytesIO(data)).iter_batches_with_custom_metadata())
    rows = [row for batch, _ in batches for row in batch.to_pylist()]
    for row in rows:
        row |= {"mark": row["mark"].hex()} if "mark" in row else {}
        if row["source"] is None:
            del row["source"]
        row["timestamp_ms"] = int(row["timestamp_ms"].timestamp() * 1000)
    items = [{"lookup": number, **item} for number, answer in enumerate(answers) for item in answer["items"]]
    assert rows == items
    status = json.loads(batches[-1][1][STATUS])
    cursors = {str(number): answer["cursor"] for number, answer in enumerate(answers) if answer["cursor"]}
    assert status["cursors"] == document["cursors"] == cursors
    assert status["status"] == document["status"]
    partial = [number for number, answer in enumerate(answers) if answer["status"] == "partial"]
    assert status["partial"] == document["partial"] == partial
    assert len(partial) <= 1 or "lacking" not in more


def test_a_client_takes_no_stream_without_its_status_for_an_answer(looked_up):
    lookups = [Lookup(topic="t", key="k3", max_count=1), ("tö", "absent")]
    with on_a_port(looked_up) as client, IndexClient(str(client.base_url)) as asking:
        table, status = asking.query_many_arrow(lookups, explain=True, max_requests=99)
        answers = asking.query_many(lookups)
        assert table["offset"].to_pylist() == [item.offset for answer in answers for item in answer]
        assert (status["status"], [*status["cursors"]]) == ("truncated", ["0"]) and status["explain"]["files"]
        (rest,) = asking.query_many([dataclasses.replace(lookups[0], cursor=status["cursors"]["0"])])
        assert rest[0].offset == looked_up.query("t", "k3", max_count=2)[1].offset
        absent, _ = asking.query_many_arrow(lookups[1:])
        assert (len(absent), absent.schema) == (0, table.schema)
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    for data in (sink.getvalue(), sink.getvalue()[:-20], b"{}"):
        with pytest.raises(StorageUnavailable, match="is this a tiered_index service"):
            decoded(table_of, httpx.Response(200, content=data, request=httpx.Request("POST", "http://host")))


@pytest.mark.parametrize(
    ("caps", "bounds"),
    [
        ({}, {"max_requests": 0}),
        ({}, {"max_cost_usd": 1e-9}),
        ({}, {"timeout_s": 1e-9}),
        ({"max_requests": 0}, {"max_requests": 9}),
    ],
)
def test_a_batch_is_held_to_its_own_bounds_and_the_services(tmp_path, caps, bounds):
    uri = published(tmp_path)
    body = {"lookups": [{"topic": "orders", "key": "order-4711"}]}
    bounded = Caps(limits=msgspec.structs.replace(Caps().limits, **caps))
    with IndexReader.open(uri) as reader, serving(reader, caps=bounded) as client:
        got = client.post("/v1/query:batch", json=body | bounds)
        assert (got.status_code, got.json()["error"]) == (422, "BudgetExceeded")
        assert [report["file"] for report in got.json()["failed"]]
        more = client.post("/v1/query:batch", json=body | {"max_requests": 9})
        assert more.status_code == (422 if caps else 200)
