"""`migrate` as a command: a dry run, then the records, and back."""

from __future__ import annotations

import pytest

from tests.integration.cli.test_copy import BEGIN_MS, offsets
from tiered_index import IndexService


@pytest.fixture
def uri(tmp_path):
    """A storage with two plain files."""
    uri = f"file://{tmp_path}/store"
    settings = {"slots": 16, "items": 400, "background": False, "layout": "plain"}
    with IndexService.open(root=tmp_path / "root", storage=uri, **settings) as index:
        for number in (1, 2):
            for offset in range(number, 100, 2):
                index.put("t", 0, "k", offset, 7, BEGIN_MS + offset * 1000)
            index.seal()
            index.run_lifecycle()
    return uri


def test_a_dry_run_then_the_records_and_back(run_here, uri, tmp_path):
    before = offsets(uri)
    planned = run_here("migrate", "--storage", uri, "--json")
    assert (planned.code, planned.document["status"], planned.document["entries"]) == (0, "planned", 99)
    number = planned.document["log_number"]
    text = run_here("migrate", "--storage", uri)
    assert "2 objects with 99 entries would be rewritten packed: " in text.out
    assert "nothing was changed: --yes does that" in text.out + text.err
    done = run_here("migrate", "--storage", uri, "--yes", "--json").document
    assert (done["status"], done["log_number"], done["written"]["jobs"]) == ("migrated", number + 2, 2)
    assert done["written"]["written_bytes"] < done["bytes"]
    assert {one["entries"] for one in done["objects"]} == {49, 50}
    assert offsets(uri) == before
    again = run_here("migrate", "--storage", uri, "--yes")
    assert "0 objects with 0 entries rewritten packed: 0 B; 2 objects are as they should be" in again.out
    back = run_here("migrate", "--storage", uri, "--layout", "plain", "--yes")
    assert "2 objects with 99 entries rewritten plain: " in back.out
    assert offsets(uri) == before
    assert run_here("verify", "--deep", "--storage", uri).code == 0
    assert run_here("verify", "--deep", "--root", tmp_path / "root", "--storage", uri).code == 0
    assert run_here("migrate", "--storage", uri, "--layout", "other").code == 2
