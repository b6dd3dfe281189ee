"""`tiered-index serve` and `token` as commands: their output, refusals and ends."""

import contextlib
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from tests.integration.cli.command_lines import clean_environment, run_here
from tests.server.conftest import PATIENCE_S, index_in, published
from tests.support.authority import Authority
from tests.support.hanging import until
from tiered_index import IndexService
from tiered_index.cli.exit_codes import UNEXPECTED
from tiered_index.cli.main import run
from tiered_index.cli.output import Output
from tiered_index.client import IndexClient
from tiered_index.errors import BackPressure, StorageUnavailable, TieredIndexError
from tiered_index.server.http.listening import HttpListener


@contextlib.contextmanager
def process_of(*arguments):
    """Run a command in a separate process until the block ends."""
    line, pipe = [sys.executable, "-m", "tiered_index", *map(str, arguments)], subprocess.PIPE
    with subprocess.Popen(line, env=clean_environment(), stdout=pipe, stderr=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@contextlib.contextmanager
def started(*arguments):
    """Run `serve` in the same way; yield its process and a client."""
    with process_of("serve", "--port", 0, "--json", *arguments) as process:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        with httpx.Client(base_url=json.loads(line)["url"], timeout=PATIENCE_S, trust_env=False) as client:
            yield process, client


@pytest.fixture(scope="module")
def storage(tmp_path_factory):
    """A storage with the published entries of the examples."""
    return published(tmp_path_factory.mktemp("stored"))


def test_an_address_may_have_the_brackets_of_a_url(tmp_path):
    done = run_here("serve", "--storage", f"file://{tmp_path}/none", "--host", "[::1]", "--port", 0, "--json")
    assert done.code == 3 and "accepts other hosts" not in done.err


def test_a_storage_is_served_until_sigterm(storage, tmp_path):
    token = run_here("token", "me", "--file", tmp_path / "tokens.json", "--json").document["token"]
    options = ("--tokens", tmp_path / "tokens.json", "--host", "0.0.0.0", "--log-format", "json", "-v")
    with started("--storage", storage, *options) as (process, client):
        params = {"topic": "orders", "key": "order-4711", "explain": True}
        got = client.get(
            "/v1/query", params=params, headers={"authorization": f"Bearer {token}", "x-request-id": "r-1"}
        )
        answer = got.json()
        assert [item["offset"] for item in answer["items"]] == [204_800, 1024]
        assert answer["as_of_ms"] == 1_762_000_090_000
        # of a local storage's path, only the last name leaves
        assert str(Path(storage).parent.name) not in got.text and "/storage" in answer["freshness"][0]["source"]
        assert client.get("/readyz").json() == {"status": "ready", "reasons": [], "problems": []}
        process.send_signal(signal.SIGTERM)
        out, error = process.communicate(timeout=PATIENCE_S)
        assert (process.returncode, json.loads(out)) == (0, {"status": "stopped"}), error
    records = [json.loads(line) for line in error.splitlines()]
    (request,) = [record for record in records if record.get("request_id") == "r-1"]
    assert (request["route"], request["status"], request["level"]) == ("/v1/query", 200, "INFO")
    assert all(record["time"] and record["logger"].startswith("tiered_index") for record in records)


def test_a_put_under_way_at_sigterm_is_ended_and_durable(tmp_path):
    place = {"root": tmp_path / "root", "storage": (tmp_path / "storage").as_uri()}
    line = {"topic": "orders", "queue_id": 0, "keys": ["k"], "offset": 1, "size": 1, "timestamp_ms": 1_762_000_000_000}
    body = json.dumps(line).encode()
    head = f"POST /v1/entries?source=s&position=1 HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    head += "Content-Type: application/x-ndjson\r\n\r\n"
    with started("--root", place["root"], "--storage", place["storage"], "--write") as (process, client):
        address = client.base_url.host, client.base_url.port
        with socket.create_connection(address, PATIENCE_S) as whole, socket.create_connection(address) as half:
            for connection in (whole, half):
                connection.sendall(head.encode() + body[:10])
            # both are in progress once a later request is answered
            assert client.get("/livez").status_code == 200
            process.send_signal(signal.SIGTERM)
            until_s = time.monotonic() + PATIENCE_S
            with pytest.raises(ConnectionRefusedError):
                while time.monotonic() < until_s:
                    # a request that arrives when the socket closes is reset
                    with contextlib.suppress(ConnectionResetError):
                        socket.create_connection(address).close()
                    # without a pause, thousands arrive before the socket closes, and each is served first
                    time.sleep(0.01)
            whole.sendall(body[10:])
            assert whole.recv(65536).startswith(b"HTTP/1.1 200 ")
            half.shutdown(socket.SHUT_WR)
            # no entry of the other request was acknowledged
            assert not half.recv(65536).startswith(b"HTTP/1.1 200 ")
        out, error = process.communicate(timeout=PATIENCE_S)
        assert (process.returncode, json.loads(out)) == (0, {"status": "stopped"}), error
    with IndexService.open(**place, background=False) as index:
        assert [item.offset for item in index.query("orders", "k")] == [1]
        assert index.durable_position("s") == 1


def test_several_storages_are_one_index_over_tls(storage, tmp_path):
    uri = (tmp_path / "other").as_uri()
    with index_in(tmp_path, storage=uri) as index:
        index.put("orders", 0, "order-4711", 7, 10, 1_762_000_090_000)
        index.seal()
        index.run_lifecycle()
    file = Authority(tmp_path).server_file
    tls = ("--tls-cert", file, "--tls-key", file)
    with started("--storage", storage, "--storage", uri, "--no-console", *tls) as (_, client):
        url = client.base_url
        assert url.scheme == "https"
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE"):
            client.get("/livez")
        known = ssl.create_default_context(cafile=file)
        with httpx.Client(base_url=url, verify=known, timeout=PATIENCE_S, trust_env=False) as trusting:
            got = trusting.get("/v1/query", params={"topic": "orders", "key": "order-4711"})
            assert [item["offset"] for item in got.json()["items"]] == [7, 204_800, 1024]
            assert [item["source"] for item in got.json()["items"]] == ["file:///other", *["file:///storage"] * 2]
            assert str(tmp_path) not in got.text
            assert trusting.get("/readyz").status_code == 200
            assert trusting.get("/console/").status_code == 404
            got = trusting.get("/v1/files")
            assert (got.status_code, got.json()["error"]) == (400, "InvalidArgument")
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http://{url.host}:{url.port}/livez", trust_env=False)


def test_unsafe_and_wrong_options_are_refused(storage, tmp_path, capsys):
    (tmp_path / "halved.json").write_text("[")
    (tmp_path / "unmounted").mkdir()
    root = tmp_path / "root"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        busy = f"can't listen on 127.0.0.1 port {port}: Address already in use; choose another port by"
        for code, arguments, said in (
            (2, ("--host", "0.0.0.0", "--port", 0), "give --tokens FILE, or --insecure"),
            (2, ("--tls-cert", "a.pem"), "belong together"),
            # a later start may find these valid
            (3, ("--tokens", tmp_path / "none.json"), "can't be read"),
            (3, ("--tokens", tmp_path / "halved.json"), "is not a file of tokens"),
            (3, ("--tls-cert", "a.pem", "--tls-key", "a.pem"), "the TLS files can't be used"),
            (3, ("--audit-log", tmp_path / "none" / "audit"), "can't be written"),
            (3, ("--port", port), f"{busy} --port"),
            (3, ("--port", 0, "--rocketmq-port", port), f"{busy} --rocketmq-port"),
            (3, ("--port", 0, "--rocketmq-port", 0, "--rocketmq-keys", tmp_path / "none.json"), "can't be read"),
            (3, ("--port", 0, "--store", tmp_path / "none"), "none is not a folder"),
            (3, ("--port", 0, "--store", tmp_path / "unmounted"), "is not a RocketMQ store"),
            (3, ("--port", 0, "--root", root, "--follow", tmp_path / "unmounted"), "is not a RocketMQ store"),
            (3, ("--port", 0, "--root", tmp_path / "unmounted"), "holds no tiered index"),
            (3, ("--port", 0, "--storage", (tmp_path / "unmounted").as_uri()), "holds no tiered index"),
        ):
            place = () if {"--root", "--storage"}.intersection(arguments) - {"--follow"} else ("--storage", storage)
            with pytest.raises(SystemExit) as ended:
                run(["serve", *place, *map(str, arguments)])
            error = capsys.readouterr().err
            assert said in error
            assert ended.value.code == code, error


def test_a_signal_right_after_the_service_is_ready_ends_it_in_good_order(storage, monkeypatch, capsys):
    note = Output.note

    def end(out, text):
        note(out, text)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Output, "note", end)
    with pytest.raises(SystemExit) as ended:
        run(["serve", "--storage", storage, "--port", "0", "--json"])
    assert ended.value.code == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"status": "stopped"}


def test_a_renewed_certificate_is_served_at_both_ports(storage, tmp_path, monkeypatch, capsys):
    """Also one of another kind of key."""
    former, renewed = Authority(tmp_path / "former"), Authority(tmp_path / "renewed", has_rsa=True)
    file, note, ports = tmp_path / "served.pem", Output.note, []
    file.write_bytes(former.server_file.read_bytes())

    def is_served(port):
        known = ssl.create_default_context(cafile=renewed.certificate_file)
        with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as plain:
            try:
                known.wrap_socket(plain, server_hostname="127.0.0.1").close()
            except ssl.SSLCertVerificationError:
                return False
        return True

    def renew(out, text):
        note(out, text)
        if text.startswith("serving "):
            ports.extend(int(port) for port in re.findall(r":(\d+)\b", text))
            file.write_text("half of a file")
            until(lambda: "new connections have the former certificate" in capsys.readouterr().err)
            assert not any(map(is_served, ports))
            file.write_bytes(renewed.server_file.read_bytes())
            until(lambda: all(map(is_served, ports)), every_s=0.1)
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(Output, "note", renew)
    options = ("--storage", storage, "--port", "0", "--rocketmq-port", "0", "--tls-cert", file, "--tls-key", file)
    with pytest.raises(SystemExit) as ended:
        run(["serve", *map(str, options)])
    assert (ended.value.code, len(ports)) == (0, 2)


def test_a_listener_that_fails_ends_the_service(storage, monkeypatch, capsys):
    """Otherwise the process would stay, and answer nobody."""
    late = []

    async def broken(_):
        raise RuntimeError("the listener broke")

    def end():
        late.append(True)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(HttpListener, "_end_idle", broken)
    watch = threading.Timer(PATIENCE_S, end)
    watch.start()
    try:
        with pytest.raises(SystemExit) as ended:
            run(["serve", "--storage", storage, "--port", "0"])
    finally:
        watch.cancel()
    assert not late and ended.value.code == UNEXPECTED
    assert "unexpected RuntimeError: the listener broke" in capsys.readouterr().err
    assert not any(thread.name == "tiered-index-listener" for thread in threading.enumerate())


def test_without_the_extra_it_says_so_in_one_sentence(storage):
    script = "import sys; sys.modules['starlette'] = None; from tiered_index.cli.__main__ import run; run()"
    line = [sys.executable, "-c", script, "serve", "--storage", storage]
    done = subprocess.run(line, env=clean_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == (
        "tiered-index: serve needs the extra 'server' (starlette is missing): pip install '.[server]' "
        "in a clone, or pip install 'FILE.whl[server]' of its wheel\n"
    )


@pytest.mark.long
def test_a_rolling_restart_loses_no_acknowledged_put(tmp_path):
    place = {"root": tmp_path / "root", "storage": (tmp_path / "storage").as_uri()}
    acknowledged, is_over, errors = [], threading.Event(), []

    def put(url):
        columns = {"topic": ["orders"], "queue_id": [0], "key": ["k"], "size": [1], "timestamp_ms": [1_762_000_000_000]}
        with IndexClient(url, tries=1) as client:
            while not is_over.is_set():
                position = len(acknowledged) + 1
                try:
                    # after a lost put, the service would refuse the next one
                    client.put_batch(columns | {"offset": [position]}, "s", position, after=position - 1)
                    acknowledged.append(position)
                except (StorageUnavailable, BackPressure):
                    time.sleep(0.02)
                except TieredIndexError as error:
                    errors.append(error)
                    return

    port, putting = 0, None
    for _ in range(3):
        count = len(acknowledged)
        with process_of(
            "serve", "--port", port, "--json", "--root", place["root"], "--storage", place["storage"], "--write"
        ) as process:
            line = process.stdout.readline()
            assert line, process.stderr.read()
            url = json.loads(line)["url"]
            if putting is None:
                port, putting = int(url.rpartition(":")[2]), threading.Thread(target=put, args=(url,))
                putting.start()
            until(lambda count=count: len(acknowledged) > count + 20 or errors)
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=PATIENCE_S)
    is_over.set()
    putting.join(PATIENCE_S)
    assert not errors
    with IndexService.open(**place, background=False) as index:
        offsets = [item.offset for page in index.query_all("orders", "k") for item in page]
    # the answer to the last put may be lost
    assert offsets == [*range(max(offsets), 0, -1)] and len(acknowledged) <= max(offsets) <= len(acknowledged) + 1
