"""`AsyncIndexReader` answers like its `IndexReader`. A cancelled task sends no further request."""

import asyncio
import inspect

import pytest

from tests.support.several_indexes import Cluster, Watched, rows
from tiered_index import AsyncIndexReader, IndexReader
from tiered_index.errors import BudgetExceeded, IndexClosed, InvalidArgument, NotAnIndex
from tiered_index.storage.opening import open_storage

WRITERS = 3


@pytest.fixture
def uri(tmp_path):
    uri = f"file://{tmp_path}/stored"
    cluster = Cluster(tmp_path)
    for seed in range(WRITERS):
        cluster.add(uri, rows(seed))
    return uri


def test_it_answers_as_the_reader_beneath(uri):
    async def ask():
        async with await AsyncIndexReader.open(uri) as reader:
            with pytest.raises(BudgetExceeded):
                await reader.query("t", "k", max_requests=0)
            answers = await asyncio.gather(
                reader.query("t", "k", max_count=5), reader.query("t", "other", max_count=5), reader.refresh()
            )
            with pytest.raises(InvalidArgument, match="max_count"):
                await reader.query("t", "k", max_count=0)
            many = await reader.query_many([("t", "k"), ("t", "other")])
            pages = [page async for page in reader.query_all("t", "k", max_count=5)]
            assert len(pages) > 1 and pages[0].items == answers[0].items and pages[-1].status == "complete"
            return answers, [answer.items for answer in many]

    (first, other, state), many = asyncio.run(ask())
    with IndexReader.open(uri) as reader:
        assert (first.items, other.items) == tuple(reader.query("t", key, max_count=5).items for key in ("k", "other"))
        assert state.number == reader.log_state.number
        assert many == [answer.items for answer in reader.query_many([("t", "k"), ("t", "other")])]
    with pytest.raises(NotAnIndex):
        asyncio.run(AsyncIndexReader.open(f"{uri}-not"))


def test_its_calls_have_the_arguments_of_the_reader_beneath():
    """They are written out, because a type checker loses the class of entries in any wrapper."""
    names = ("open", "query", "query_many", "query_all", "messages", "topics", "export", "writers", "refresh")
    for name in names:
        ours, its = (inspect.signature(getattr(kind, name)).parameters for kind in (AsyncIndexReader, IndexReader))
        assert ours == its, name


def test_an_export_is_the_one_of_the_reader_beneath(uri):
    async def exported():
        async with await AsyncIndexReader.open(uri) as reader:
            with pytest.raises(InvalidArgument, match="topics"):
                await reader.export(3)
            async with await reader.export("t") as export:
                batches = [batch async for batch in export]
            return batches, export.export.entries, export.export.checksum

    batches, entries, checksum = asyncio.run(exported())
    with IndexReader.open(uri) as reader, reader.export("t") as export:
        expected = sorted(str(row) for batch in export for row in batch.to_pylist())
        assert (entries, checksum) == (export.entries, export.checksum) and entries == len(expected) > 0
    assert sorted(str(row) for batch in batches for row in batch.to_pylist()) == expected


async def cancel(storage, operation, call):
    """Cancel a task whose request hangs. Return the hang."""
    hang = storage.hang(operation)
    task = asyncio.create_task(call)
    assert await asyncio.to_thread(hang.entered.wait, 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    return hang


def test_an_export_that_lost_a_batch_to_a_cancelled_task_is_refused_and_closed(uri):
    """Nobody gets the batch of the cancelled task, so the rest would not be all entries."""
    storage = Watched(open_storage(uri))

    async def cancelled():
        async with await AsyncIndexReader.open(storage_backend=storage, query_threads=1) as reader:
            async with await reader.export() as export:
                (await cancel(storage, "get_range", anext(export))).release.set()
                for _ in range(2):
                    with pytest.raises(IndexClosed, match="a cancelled task lost a batch"):
                        await anext(export)
            export = await reader.export()
            hang = await cancel(storage, "get_range", anext(export))
            # it waits for the batch
            closing = asyncio.create_task(export.close())
            hang.release.set()
            await closing
            # an end would look like that of a whole export
            with pytest.raises(InvalidArgument, match="closed: begin another export"):
                await anext(export)

    asyncio.run(cancelled())


def test_a_cancelled_task_sends_no_further_request(uri):
    storage = Watched(open_storage(uri))

    async def cancelled():
        async with await AsyncIndexReader.open(storage_backend=storage, query_threads=1) as reader:
            before = storage.requests()
            (await cancel(storage, "get_range", reader.query("t", "k"))).release.set()
            while reader._threads._work.count(0):
                await asyncio.sleep(0.01)
            sent = storage.requests() - before
            await reader.query("t", "k")
            return sent, storage.requests() - before - sent

    # only the request that hung
    sent, needed = asyncio.run(asyncio.wait_for(cancelled(), 120))
    assert sent == 1 < needed


def test_a_storage_that_opens_too_late_is_closed(uri):
    storage = Watched(open_storage(uri))

    async def cancelled():
        (await cancel(storage, "list", AsyncIndexReader.open(storage_backend=storage))).release.set()
        while not storage.closed:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(cancelled(), 120))
