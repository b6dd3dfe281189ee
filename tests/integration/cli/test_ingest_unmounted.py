"""`ingest STORE_DIR` where the disk of the commit log isn't mounted: exit code 3, and nothing is said to be deleted."""

from __future__ import annotations

import pytest

from tests.integration.cli.followers import SMALL
from tests.rocketmq.followed import SEGMENT
from tests.support.store_writer import StoreWriter


@pytest.mark.parametrize("options", [("--skip-missing",), ("--skip-missing", "--follow")])
def test_an_empty_mount_point_is_unavailable_and_the_position_stays(run_here, tmp_path, options):
    store, mount = tmp_path / "store", tmp_path / "store" / "commitlog"
    where = ("--root", tmp_path / "root", "--storage", f"file://{tmp_path / 'objects'}", *SMALL, "--json")
    with StoreWriter(store, segment_bytes=SEGMENT) as writer:
        for number in range(100):
            writer.put("orders", 0, keys=f"own-{number}", store_ms=1_700_000_000_000 + number)
    position = run_here("ingest", store, *where).document["position"]
    mount.rename(tmp_path / "disk")
    mount.mkdir()
    done = run_here("ingest", store, *where, *options)
    assert (done.code, done.error["type"]) == (3, "StorageUnavailable")
    assert f"{mount} has no segment, and was read up to offset {position}" in done.error["message"]
    assert "missing:" not in done.err and "rewritten:" not in done.err
    mount.rmdir()
    (tmp_path / "disk").rename(mount)
    again = run_here("ingest", store, *where).document
    assert (again["resumed_from"], again["messages"], again["losses"]) == (position, 0, [])
