"""The demo with few messages: a store is followed, both kills happen, nothing is lost, no answer is wrong; on an S3
server and on a folder.
"""

from __future__ import annotations

import pytest

from tests.demo.command import main
from tests.integration.cli.command_lines import run_here, run_script

PLACES = [
    "write buffer",
    "unsealed file",
    "compacted file",
    "uploaded, local copy",
    "storage only, first",
    "storage only",
    "after an erase",
]


def check(document):
    assert document["status"] == "ok"
    assert (document["entries_lost"], document["entries_unexpected"], document["wrong_answers"]) == (0, 0, 0)
    ending = document["ending"]
    assert ending["wrong"] == [] and ending["erased_entries"] >= 1 <= ending["retention_objects"]
    assert document["entries_stored"] == document["entries_expected"] + document["entries_repeated"]
    assert document["entries_expected"] == document["entries"] > document["messages"]
    assert [f["place"] for f in document["lookups"]] == PLACES
    states = [set(f["files"]) for f in document["lookups"]]
    assert (
        "unsealed" in states[1] and "compacted" in states[2] and states[3] == {"uploaded"} and states[5] == {"storage"}
    )
    assert (document["log_segments"], document["log_bytes"] > 1_000_000) == (1, True)
    assert all(kill["resumed_from"] <= kill["log_end"] <= document["log_bytes"] for kill in document["kills"])
    assert all(f["requests_per_lookup"] == 0 for f in document["lookups"][:4])
    assert all(f["requests_per_lookup"] > 0 and f["bytes_per_lookup"] > 0 for f in document["lookups"][4:])


@pytest.mark.long
def test_the_demo_on_the_embedded_server(tmp_path):
    outcome = run_script(
        *["--messages", "12000", "--lookups", "100", "--cold-lookups", "20", "--json", "--quiet"],
        module="tests.demo",
        timeout=240,
        environment={
            "TIERED_INDEX_ROOT": str(tmp_path / "mine"),
            "TIERED_INDEX_PRESET": "rocketmq",
            "TMPDIR": str(tmp_path),
        },
    )
    assert outcome.code == 0, outcome
    assert [line for line in outcome.err.splitlines() if "simulated outage" not in line] == []
    check(outcome.document)
    assert "not those of S3" in outcome.document["storage"]
    assert [kill["moment"] for kill in outcome.document["kills"]] == ["while writing", "in the middle of an upload"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_demo_on_a_folder_prints_its_table(tmp_path):
    uri = f"file://{tmp_path / 'store'}"
    sizes = ("--messages", 12_000, "--lookups", 60, "--cold-lookups", 20)
    outcome = run_script(*sizes, "--storage", uri, "--keep", tmp_path / "kept", module="tests.demo", timeout=240)
    assert outcome.code == 0, outcome
    assert "all right" in outcome.out
    for text in ("entries lost        0", "wrong answers       0", "kills survived"):
        assert text in outcome.out
    assert "SIGKILL" in outcome.err
    assert (tmp_path / "kept" / "root" / "tiered_index.json").exists()
    (folder,) = (tmp_path / "store").glob("demo-*")
    kept = run_here("verify", "--deep", "--root", tmp_path / "kept" / "root", "--storage", f"file://{folder}", "--json")
    assert (kept.code, kept.document["findings"]) == (0, [])


@pytest.mark.parametrize(
    "arguments", [("--messages", 5), ("--storage", "memory://x"), ("--messages", 10_000, "--storage", "gopher://x")]
)
def test_bad_usage(arguments):
    assert run_here(*arguments, program=main).code == 2
