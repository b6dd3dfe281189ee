"""The broker's sidecar: `serve --follow` ingests, serves entries and messages, and reports its position."""

import contextlib
import json
import re
import signal
import time
from types import SimpleNamespace

import pytest

from tests.rocketmq.followed import SteppedDispatcher
from tests.server.conftest import PATIENCE_S, on_a_port, serving
from tests.server.test_serve_command import started
from tests.support.hanging import until
from tests.support.store_writer import StoreWriter
from tests.support.stored_messages import compress
from tiered_index import IndexReader, IndexService
from tiered_index.base import call
from tiered_index.base.call import remaining_s
from tiered_index.cli.main import run
from tiered_index.client import IndexClient
from tiered_index.client.answers import NotThere
from tiered_index.connectors.rocketmq.archive.messages import RocketmqMessages
from tiered_index.connectors.rocketmq.log.store import StoreDirectory
from tiered_index.errors import InvalidArgument
from tiered_index.server.http.served import Caps

T = 1_762_000_000_000
# a name that an application may give its messages
ODD = "/a/../b//?c=%2F&d#e +é\\"


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory):
    """A store with three messages, and a client of the service that follows it."""
    folder = tmp_path_factory.mktemp("sidecar")
    with StoreWriter(folder / "store") as writer:
        for number in range(3):
            writer.put("orders", 0, b'{"n": %d}' % number, keys=["k"], uniq_key=f"U{number}", store_ms=T + number)
        writer.put("odd", 0, b"odd", uniq_key=ODD, store_ms=T)
        writer.flush()
        index = ("--root", folder / "root", "--storage", (folder / "storage").as_uri())
        with started(*index, "--follow", folder / "store", "--max-lag", 60) as (process, client):
            with IndexReader.open(root=folder / "root") as reader:
                # another reader, which sees the flushed entries
                until(lambda: len(reader.query("orders", "k")) == 3 and len(reader.query("odd", ODD)) == 1)
                # that the store was read to its end is told after its messages
                until(lambda: reader.query("orders", "k").as_of_ms)
            yield folder, process, client


def test_an_id_may_have_any_characters(sidecar):
    _, _, client = sidecar
    with IndexClient(str(client.base_url)) as asking:
        (fetched,) = asking.message(ODD, "odd").messages
        assert (fetched.message.to_dict()["uniq_key"], fetched.message.to_dict()["body"]) == (ODD, "odd")
        with pytest.raises(NotThere, match="no message"):
            asking.message(ODD[:-1], "odd")
        for other in (".", "..", "a/../b"):
            with pytest.raises(NotThere, match=f"no message {re.escape(other)}"):
                asking.message(other, "odd")
        with pytest.raises(InvalidArgument, match="not UTF-8"):
            asking.message("\ud800", "odd")
        with pytest.raises(InvalidArgument, match="half a surrogate pair"):
            asking.query("odd", "\ud800")
    # a request's path appears in no metric
    assert 'route="/v1/messages/{id}",status="200"' in client.get("/metrics").text


@contextlib.contextmanager
def serving_log(folder, puts, **caps):
    """Yield a client of a service of a log with these messages of one topic, one per second."""
    with StoreWriter(folder / "store") as writer:
        for number, put in enumerate(puts):
            writer.put("orders", 0, store_ms=T + number * 1000, **put)
        writer.flush()
    places = {"root": folder / "root", "storage": (folder / "s").as_uri()}
    with IndexService.open(**places, offset_space="commitlog") as index:
        SteppedDispatcher(index, StoreDirectory.open(folder / "store"), now_s=lambda: 0.0).run_once()
        index.flush()
        with serving(index, store=folder / "store", caps=Caps(**caps)) as client:
            yield client


@pytest.mark.parametrize(
    ("owns", "pages"), [("111", [["2", "1"], ["0"]]), ("100", [["2"], []]), ("001", [[], ["0"]]), ("000", [[], []])]
)
def test_the_pages_of_a_unique_key_within_a_bound_of_bytes_are_there_up_to_the_last(tmp_path, owns, pages):
    """Also among other messages. `owns`, from the newest message on: 1 with the unique key, 0 for another one."""
    names = ["U" if own == "1" else f"other{number}" for number, own in enumerate(reversed(owns))]
    puts = [{"body": b"%d" % n * 1000, "keys": ["U"], "uniq_key": name} for n, name in enumerate(names)]
    with serving_log(tmp_path, puts, message_bytes=2500) as client:
        params, answers = {"topic": "orders"}, []
        while not answers or answers[-1]["cursor"]:
            got = client.get("/v1/messages/U", params=params)
            assert got.status_code == 200, got.text
            answers.append(got.json())
            params["cursor"] = answers[-1]["cursor"]
        assert [[row["message"]["body"][0] for row in answer["messages"]] for answer in answers] == pages
        assert [answer["status"] for answer in answers] == ["truncated", "complete"]
        assert client.get("/v1/messages/none", params={"topic": "orders"}).status_code == 404


def test_compressed_bodies_come_within_the_bound_too(tmp_path):
    body, flags = compress(b"0" * 100_000, "zlib")
    puts = [{"body": body, "sys_flag": flags, "keys": ["k"], "uniq_key": f"U{number}"} for number in range(3)]
    with serving_log(tmp_path, puts, message_bytes=150_000) as client:
        rows = client.get("/v1/messages", params={"topic": "orders", "key": "k"}).json()["messages"]
        messages = [row["message"] for row in rows]
        assert [message["body_format"] for message in messages] == ["text", "hex", "hex"]
        assert messages[0]["body"] == "0" * 100_000
        assert messages[1]["body"] == body.hex() and "larger than" in messages[1]["body_problem"]


# parts that differ between two calls, or two readers of the log, or that a service does not tell
VOLATILE = {"elapsed_ms", "bytes", "explain", "as_of_ms", "freshness"}


def masked(value, name=None):
    if name in VOLATILE:
        return [file["file"] for file in value.get("files", ()) if file["file"] != "log"] if name == "explain" else ""
    if isinstance(value, dict):
        return {key: masked(part, key) for key, part in value.items()}
    if isinstance(value, list):
        return [masked(part) for part in value]
    return value


def plain(line):
    """Return a line without its variable parts: times, sizes, widths of tables. A service tells no writer."""
    return re.sub(r"[\d.]+ ms|[\d.,]+ \w*B\b|─+|(?<=as of )\S+Z|; the writer is alive", "", " ".join(line.split()))


READING = [
    ("query", "orders", "k"),
    ("query", "orders", "k", "--all"),
    ("query", "orders", "k", "--all", "--max", "1"),
    ("query", "orders", "k", "--begin", "0", "--end", "9223372036854775807", "--max", "1"),
    ("query", "orders", "k", "--messages"),
    ("query", "orders", "k", "--messages", "--body", "json", "--all"),
    ("message", "U1", "--topic", "orders"),
    ("message", "NONE", "--topic", "orders"),
    ("topics",),
    ("topics", "--begin", "0", "--end", "9223372036854775807"),
    ("files",),
    ("topics", "--by", "topic,state"),
    ("verify", "--deep"),
]


@pytest.mark.parametrize("arguments", READING, ids=" ".join)
def test_a_command_prints_the_same_of_a_service_as_of_the_index(sidecar, capsys, arguments):
    folder = sidecar[0]
    store = ("--store", folder / "store") if {"--messages", "message"} & {*arguments} else ()

    def printed(*place):
        with contextlib.suppress(SystemExit):
            run([*arguments, *map(str, place)])
        out, err = capsys.readouterr()
        return out, err

    for form in ("--json",), ():
        own, _ = printed("--root", folder / "root", *store, *form)
        with IndexReader.open(root=folder / "root") as reader, on_a_port(reader, store=folder / "store") as client:
            printed_there, err = printed("--url", client.base_url, *form)
        if "NONE" in arguments:
            assert (printed_there, "no message NONE" in err) == ("", True)
            continue
        # the service does not tell where the files are
        assert str(folder) not in printed_there
        seen = printed_there.replace("[store]", str(folder / "store")).replace("[root]", str(folder / "root"))
        if form:
            documents = [[masked(json.loads(line)) for line in lines.splitlines()] for lines in (seen, own)]
            assert documents[0] == documents[1]
        else:
            assert [*map(plain, seen.splitlines())] == [*map(plain, own.splitlines())], err


def test_it_says_how_far_it_is_and_ends_in_order(sidecar):
    _, process, client = sidecar
    metrics = client.get("/metrics").text
    assert "\ntiered_index_follow_lag_bytes 0.0\n" in metrics
    assert client.get("/readyz").status_code == 200
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, error


def test_no_body_is_decompressed_after_the_deadline(tmp_path, monkeypatch):
    body, flags = compress(b"0" * 1000, "zlib")
    fetch, later_s = RocketmqMessages.fetch, 0.0

    def slowly(source, *of_items):
        nonlocal later_s
        fetched = fetch(source, *of_items)
        later_s = remaining_s() + 1
        return fetched

    # the clock of deadlines
    monkeypatch.setattr(call, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + later_s))
    params = {"topic": "orders", "key": "k", "timeout_s": PATIENCE_S}
    with serving_log(tmp_path, [{"body": body, "sys_flag": flags, "keys": ["k"]}]) as client:
        assert client.get("/v1/messages", params=params).json()["messages"][0]["message"]["body"] == "0" * 1000
        monkeypatch.setattr(RocketmqMessages, "fetch", slowly)
        got = client.get("/v1/messages", params=params)
        assert (got.status_code, got.json()["error"]) == (422, "BudgetExceeded"), got.text
        later_s = 0.0
        late = client.get("/v1/messages", params=params | {"allow_partial": True}).json()
        told = late["messages"][0]["message"]
        assert late["status"] == "partial" and "timeout_s was reached" in told["body_problem"]
        assert told["body_format"] == "hex" and told["body"] == body.hex()
