"""A service follows the source of a connector of another package, and tells what that adds to health and metrics."""

import os
import signal
from pathlib import Path

import pytest

from tests.server.test_serve_command import PATIENCE_S, started
from tests.support.hanging import until
from tests.support.toy_package import install_toys
from tiered_index import IndexReader


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[object, ...]:
    (packages := tmp_path / "packages").mkdir()
    install_toys(packages)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(packages), os.environ.get("PYTHONPATH", "")]))
    return "--root", tmp_path / "root", "--storage", (tmp_path / "storage").as_uri()


def test_a_service_follows_the_source_of_another_package_and_tells_its_health_and_metrics(
    places: tuple[object, ...], tmp_path: Path
) -> None:
    options = ("--toy-loud", "--toy-speed", 3, "--max-lag", 60)
    with started(*places, "--follow", "toy:3", *options) as (process, client):
        params = {"topic": "toys", "key": "k2"}
        until(lambda: len(client.get("/v1/query", params=params).json()["items"]) == 1)
        problems = {each["reason"] for each in client.get("/v1/health").json()["problems"] if each["part"] == "source"}
        lines = client.get("/metrics").text.splitlines()
        process.send_signal(signal.SIGTERM)
        _, error = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, error
    assert {"source: the toy is loud", "toy: the box is open"} <= problems
    assert "tiered_index_follow_toys 3.0" in lines and "tiered_index_follow_position_numbers 3.0" in lines
    with IndexReader.open(root=tmp_path / "root") as reader:
        assert len(reader.query("toys", "k2")) == 1
