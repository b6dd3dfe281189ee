"""`query` with bounds, and over several indexes: exit codes, the one document on stdout, its text, and stderr."""

import re
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest

from tests.integration.cli.command_lines import Outcome, run_here
from tests.support.cold_index import ColdIndex, cold_index
from tiered_index import IndexService
from tiered_index.base.units import format_time
from tiered_index.storage.opening import open_storage

FILES = 6
REQUESTS = 2 * FILES
# of a reader without a cache: a directory and a group per file
Run = Callable[..., Outcome]


class Cluster:
    """Two indexes of different sizes below one prefix.

    Each file has the key ``all`` once. The times of both are the same.
    """

    def __init__(self, folder: Path) -> None:
        self.prefix = f"file://{folder}/cluster"
        self.made: dict[str, ColdIndex] = {}
        for name, files in (("a", FILES), ("b", 2)):
            self.made[name] = cold_index(folder / f"root-{name}", files=files, storage=open_storage(self.uri(name)))

    def uri(self, name: str) -> str:
        return f"{self.prefix}/{name}"

    def offsets(self, name: str = "a") -> list[int]:
        """Return the answers to ``all`` of one index."""
        return [answer.offset for answer in self.made[name].expected("t", "all")]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    return Cluster(tmp_path_factory.mktemp("cluster"))


@pytest.fixture
def query(cluster: Cluster) -> Run:
    """Return a function that looks ``all`` up in the first index, or in the given storages, in this process.

    It reads one file after the other, so that a page's cost does not depend on the speed of several reads.
    """

    def run(*arguments: object, storages: tuple[str, ...] = (cluster.uri("a"),)) -> Outcome:
        named = [word for uri in storages for word in ("--storage", uri)]
        return run_here("query", "t", "all", *named, *arguments, environment={"TIERED_INDEX_QUERY_THREADS": "1"})

    return run


def offsets(items: list[dict[str, Any]]) -> list[int]:
    return [item["offset"] for item in items]


@pytest.mark.parametrize("limit", [0, 5, REQUESTS])
def test_one_document_has_the_entries_found_within_max_requests(query, cluster, limit):
    done = query("--json", "--max-requests", limit)
    document = done.document
    assert document["explain"]["requests"] <= limit
    answered = offsets(document["items"])
    read = [file["matched"] for file in document["explain"]["files"] if file["outcome"] == "read"]
    assert len(answered) == sum(read)
    assert set(answered) <= set(cluster.offsets())
    if limit == REQUESTS:
        assert (done.code, done.err, document["status"], answered) == (0, "", "complete", cluster.offsets())
        assert "error" not in document
        return
    assert (done.code, document["status"]) == (6, "partial")
    assert len(document["failed"]) == FILES - len(answered) > 0
    assert (document["error"]["type"], document["error"]["exit_code"]) == ("BudgetExceeded", 6)
    assert f"--max-requests={limit}" in document["error"]["message"]
    assert done.error == document["error"]


@pytest.mark.parametrize("every", [(), ("--all",)])
def test_a_time_that_is_up_leaves_an_answer_without_any(query, every):
    done = query("--json", "--timeout", 1e-9, *every)
    assert done.code == 6
    last = done.records[-1]
    assert (last["status"], last.get("items", []), last["error"]["type"]) == ("partial", [], "BudgetExceeded")
    assert "--timeout" in done.error["message"]
    assert len(done.records) == 1
    assert query("--json", "--timeout", 1000, *every).code == 0


def merged(cluster: Cluster) -> list[tuple[int, int, str]]:
    """Return (time, offset, source) of both indexes' answers, in answer order except for entries of one place."""
    by_uri = {cluster.uri(name): made.expected("t", "all") for name, made in cluster.made.items()}
    both = [(answer.timestamp_ms, answer.offset, uri) for uri, answers in by_uri.items() for answer in answers]
    return sorted(both, key=lambda entry: (-entry[0], -entry[1]))


@pytest.mark.parametrize("named", ["list", "prefix"])
def test_several_indexes_give_one_answer_with_the_source_of_each_entry(query, cluster, tmp_path, named):
    storages = (cluster.uri("a"), cluster.uri("b")) if named == "list" else (cluster.prefix,)
    place = itemgetter("timestamp_ms", "offset", "source")
    entries = list(map(place, query("--json", storages=storages).document["items"]))
    assert sorted(entries) == sorted(merged(cluster))
    assert [entry[:2] for entry in entries] == [entry[:2] for entry in merged(cluster)]
    paged = query("--json", "--all", "--max", 3, storages=storages).records
    assert list(map(place, paged[:-1])) == entries
    text = query("--explain", storages=storages).out
    assert re.search(r"topic id\s+source", text)
    assert text.count(cluster.uri("b")) >= 2 * 2  # each of its entries and files
    assert f"{FILES + 2} files read, 0 skipped" in text
    (tmp_path / "commitlog").mkdir()
    refused = query("--messages", "--store", tmp_path, storages=storages)
    assert refused.code == 2 and f"{tmp_path} belongs to one broker, but 2 indexes are read" in refused.err


def test_an_answer_of_several_indexes_is_as_old_as_the_oldest_and_names_those_with_nothing_published(
    query, cluster, tmp_path
):
    empty = f"file://{tmp_path}/empty"
    IndexService.open(root=tmp_path / "root", storage=empty, background=False).close()
    both, more = (cluster.uri("a"), cluster.uri("b")), (cluster.uri("a"), empty)
    oldest = min(query("--json", storages=both).document["freshness"], key=itemgetter("as_of_ms"))
    when = format_time(oldest["as_of_ms"])
    assert f" as of {when} ({oldest['source']}, the oldest of 2)" in query(storages=both).out
    assert f"({cluster.uri('a')}, the oldest of 2; of 1 nothing is published yet)" in query(storages=more).out
    topics = run_here("topics", *(word for uri in both for word in ("--storage", uri)), "--json")
    assert (topics.code, len(topics.document["freshness"])) == (0, 2)


@pytest.mark.parametrize("flags", [("--max", 2), ("--all", "--max", 1), ()])
def test_the_table_adds_up_to_the_totals(query, flags):
    out = query(*flags, "--explain").out
    table = out[out.index(" file  ") :]
    rows = [
        [cell.replace(",", "") for cell in re.split(" {2,}", line.strip())[3:]]
        for line in table.splitlines()[2:]
        if line.strip() and line.count("  ") > 6
    ]
    sums = re.findall(r"(\d) files? read, (\d) skipped, (\d+) requests, ([\d.]+) KiB", out)
    ((files, skipped, requests, kib),) = sums
    assert sum(int(row[0]) for row in rows) == int(requests)
    assert sum(float(row[1]) for row in rows) == pytest.approx(float(kib), abs=0.05 * (len(rows) + 1))
    (usd,) = re.findall(r"([\d.]+) USD per million", out)
    assert sum(float(row[2]) for row in rows) == pytest.approx(float(usd), abs=0.005 * len(rows))
    assert int(files) + int(skipped) == FILES
    names = re.findall(r"^ ([0-9a-f]{15}-[0-9a-f]{12})  ", table, re.MULTILINE)
    assert len(set(names)) == int(files)
    document = query(*(flags if "--all" not in flags else ()), "--json").document
    assert sum(file["requests"] for file in document["explain"]["files"]) == document["explain"]["requests"]
    assert out.endswith(" at the prices of 2026-11\n")
