"""A forked child accepted entries that no process ever wrote, and waited permanently in a lookup for threads of its
parent. It is refused, and opens its own index or reader.
"""

import asyncio
import json
import os
import signal
from functools import partial
from operator import attrgetter

import pytest

from tests.support.batches import batch
from tests.support.hanging import beside
from tiered_index import AsyncIndexReader, IndexReader, IndexService
from tiered_index.errors import IndexClosed

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
NOW_MS = 1_700_000_000_000
FILES = 10
SMALL = {"slots": 7, "items": 12}
HANGS_S = 60


def in_child(act):
    """Return the result of `act` in a forked child, as JSON has it; an error as its class and text."""
    ends = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(HANGS_S)
        try:
            result = act()
        except BaseException as error:  # noqa: BLE001 - told to the parent
            result = [type(error).__name__, str(error)]
        os.write(ends[1], json.dumps(result).encode())
        os._exit(0)
    os.close(ends[1])
    with os.fdopen(ends[0], "rb") as pipe:
        answer = pipe.read()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    return json.loads(answer)


@pytest.fixture(params=["file", "sqlite", "s3"])
def arguments(request, tmp_path):
    """The arguments that open the storage: `FILES` files with one entry of key k each."""
    if request.param == "s3":
        server = request.getfixturevalue("s3_environment")
        options = {"storage": f"s3://{server.new_bucket()}/p", "s3": {"endpoint_url": server.endpoint_url}}
    else:
        options = {"storage": f"{request.param}://{tmp_path}/stored"}
    with IndexService.open(root=tmp_path / "writer", background=False, **SMALL, **options) as service:
        for number in range(FILES):
            service.put("t", 0, "k", number, 1, NOW_MS + number * 1000)
            service.seal()
        service.run_lifecycle()
    return options


def offsets(reader, **bounds):
    return [item.offset for item in reader.query("t", "k", **bounds)]


def refused(act):
    """Whether a child gets the error that the parent opened its index."""
    kind, text = in_child(act)
    return kind == "IndexClosed" and "open it after the fork" in text


def test_a_child_opens_its_own_reader(arguments, tmp_path):
    """That of the parent is refused, and answers the parent as before."""
    expected = list(reversed(range(FILES)))

    def own():
        with IndexReader.open(**arguments) as reader:
            return offsets(reader)

    with IndexReader.open(cache_dir=tmp_path / "cache", **arguments) as reader:
        assert offsets(reader) == expected
        assert refused(partial(offsets, reader)) and refused(partial(offsets, reader, timeout_s=HANGS_S))
        assert refused(reader.refresh) and refused(reader.files)
        assert in_child(own) == expected
        # a child of a child
        assert in_child(lambda: [own(), in_child(own)]) == [expected, expected]
        assert in_child(reader.close) is None
        assert offsets(reader) == expected


@pytest.mark.parametrize("arguments", ["file", "sqlite"], indirect=True)
def test_a_child_opens_a_reader_while_others_use_one(arguments):
    """The child waits for no lock that the parent's threads hold."""
    with IndexReader.open(refresh_interval_s=0, **arguments) as reader:
        stop = []

        def ask():
            while not stop:
                offsets(reader)

        def own():
            with IndexReader.open(**arguments) as reader:
                return len(offsets(reader))

        asking = [beside(ask) for _ in range(3)]
        try:
            for _ in range(5):
                assert in_child(own) == FILES
        finally:
            stop.append(True)
        assert all(call.ended(30) and call.error is None for call in asking)


@pytest.mark.parametrize("arguments", ["file"], indirect=True)
def test_a_child_is_refused_objects_that_it_can_not_use(arguments):
    async def ask(reader):
        return await reader.query("t", "k")

    with IndexReader.open(**arguments) as reader, reader.export() as export:
        storage = reader.storage
        assert refused(lambda: [len(batch) for batch in export])
        assert refused(lambda: [info.name for info in storage.list()])
        assert sum(map(len, export)) == FILES
    reader = AsyncIndexReader(IndexReader.open(**arguments))
    assert len(asyncio.run(ask(reader))) == FILES
    assert refused(lambda: asyncio.run(ask(reader)))
    asyncio.run(reader.close())


CALLS = {"put": ("t", 0, "k", 1, 1, NOW_MS), "put_batch": (batch(1),), "archive": ("s", 0, 1, lambda at, length: b"1")}
CALLS |= {"query": ("t", "k"), "query_many": ([("t", "k")],), "durable_position": ("s",)}
for name in ("flush", "seal", "run_lifecycle", "topics", "export", "files", "du", "durable_positions", "cache_use"):
    CALLS[name] = ()
PROPERTIES = ("log_state", "storage.uri", "expired", "segment_archive")


@pytest.mark.parametrize("background", [True, False])
def test_a_writer_refuses_every_call_of_a_child(tmp_path, background):
    options = {"root": tmp_path / "root", "storage": f"file://{tmp_path}/storage", "background": background, **SMALL}
    with IndexService.open(**options) as service:

        def each():
            answers = {}
            calls = {name: partial(attrgetter(name)(service), *arguments) for name, arguments in CALLS.items()}
            calls |= {name: partial(attrgetter(name), service) for name in PROPERTIES}
            for name, call in calls.items():
                try:
                    answers[name] = repr(call())
                except IndexClosed as error:
                    answers[name] = "refused" if "fork" in str(error) else str(error)
            problems = service.health()["problems"]
            service.close()
            return [answers, problems]

        answers, problems = in_child(each)
        assert answers == dict.fromkeys([*CALLS, *PROPERTIES], "refused")
        assert len(problems) == 1 and "fork" in problems[0]
        service.put("t", 0, "k", 1, 1, NOW_MS)
        child = os.fork()
        if not child:
            # keeps no copy of the parent's lock
            signal.pause()
    try:
        with IndexService.open(**options) as again:
            assert len(again.query("t", "k")) == 1
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
