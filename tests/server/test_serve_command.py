"""`tiered-index serve` and `token` as commands: what they print, refuse, and how they end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.server.conftest import PATIENCE_S, put_entries
from tiered_index import IndexService

ROOT = Path(__file__).parents[2]


def command(*arguments):
    return [sys.executable, "-m", "tiered_index", *map(str, arguments)]


def environment():
    return {name: value for name, value in os.environ.items() if not name.startswith("TIERED_INDEX_")}


@contextlib.contextmanager
def started(*arguments):
    """Run `serve` in a process of its own until the block ends; yields its process and a client."""
    with subprocess.Popen(
        command("serve", "--port", 0, "--json", *arguments),
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            line = process.stdout.readline()
            assert line, process.stderr.read()
            with httpx.Client(base_url=json.loads(line)["url"], timeout=PATIENCE_S, trust_env=False) as client:
                yield process, client
        finally:
            process.kill()


def refused(*arguments):
    done = subprocess.run(
        command(*arguments),
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    return done.returncode, done.stderr


@pytest.fixture(scope="module")
def storage(tmp_path_factory):
    """A storage with the examples' entries, published."""
    folder = tmp_path_factory.mktemp("stored")
    uri = (folder / "storage").as_uri()
    with IndexService.open(root=folder / "root", storage=uri, slots=100, items=1000, background=False) as index:
        put_entries(index)
        index.seal()
        index.run_lifecycle()
    return uri


def test_a_storage_is_served_until_sigterm(storage, tmp_path):
    made = subprocess.run(
        command("token", "me", "--file", tmp_path / "tokens.json", "--json"),
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    token = json.loads(made.stdout)["token"]
    with started("--storage", storage, "--tokens", tmp_path / "tokens.json", "--host", "0.0.0.0") as (process, client):
        asked = {"topic": "orders", "key": "order-4711", "explain": True}
        got = client.get("/v1/query", params=asked, headers={"authorization": f"Bearer {token}"})
        answer = got.json()
        assert [item["offset"] for item in answer["items"]] == [204_800, 1024]
        assert answer["as_of_ms"] == 1_762_000_090_000
        # of a local storage's path only the last name leaves
        assert str(Path(storage).parent.name) not in got.text and "/storage" in answer["freshness"][0]["source"]
        assert client.get("/readyz").json() == {"status": "ready", "reasons": []}
        process.send_signal(signal.SIGTERM)
        out, error = process.communicate(timeout=PATIENCE_S)
        assert (process.returncode, json.loads(out)) == (0, {"status": "stopped"}), error


def test_what_is_unsafe_or_wrong_is_refused(storage, tmp_path):
    code, error = refused("serve", "--storage", storage, "--host", "0.0.0.0", "--port", 0)
    assert code == 2 and "give --tokens FILE, or --insecure" in error
    code, error = refused("serve", "--storage", storage, "--tls-cert", "a.pem")
    assert code == 2 and "belong together" in error
    code, error = refused("serve", "--storage", storage, "--tokens", tmp_path / "none.json")
    assert code == 2 and "can't be read" in error


def test_without_the_extra_it_says_so_in_one_sentence(storage):
    script = "import sys; sys.modules['fastapi'] = None; from tiered_index.cli.__main__ import run; run()"
    done = subprocess.run(
        [sys.executable, "-c", script, "serve", "--storage", storage],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == (
        "tiered-index: serve needs the extra 'server' (fastapi is missing): pip install 'tiered_index[server]'\n"
    )
