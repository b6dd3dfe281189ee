"""docs/restore.md: each recipe runs unchanged, after its incident. No entry is lost."""

import json
import re
import shlex
import shutil
import subprocess

import pytest

from tests.integration.cli.command_lines import TOP, run_here
from tests.support.damage import flip
from tiered_index import IndexReader, IndexService
from tiered_index.base.clock import SystemClock
from tiered_index.errors import CorruptFile, WriterFenced
from tiered_index.service.log.session import Lease
from tiered_index.storage.opening import open_storage

PAGE = (TOP / "docs/restore.md").read_text()
RECIPES = dict(re.findall(r"^## ([^\n]*)\n(?:(?!^## ).)*?^```sh\n(.*?)^```", PAGE, re.M | re.S))
GEOMETRY = ("--slots", 16, "--items", 4000)
STORE = "file://{}/store"
GIVING_UP = "Give up a lost object"
FILE_ID = "001700000000000-0123456789ab"
"""A file of the page, in place of which a recipe gets a file of the test."""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def ingest(here):
    """Return a function that adds messages of one key to the source, and ingests them."""
    written = [0]

    def ingest(count, *more, root="root", stdin=False):
        first, written[0] = written[0], written[0] + count
        same, begin_ms = {"topic": "orders", "queue_id": 0, "keys": ["order-1"], "size": 9}, 1_700_000_000_000
        numbers = range(first, first + count)
        messages = [same | {"offset": number, "timestamp_ms": begin_ms + number * 1000} for number in numbers]
        lines = "".join(json.dumps(message) + "\n" for message in messages)
        if not stdin:
            with (here / "source.ndjson").open("a") as file:
                file.write(lines)
        source = "-" if stdin else "source.ndjson"
        where = ("--root", root, "--storage", STORE.format(here), *GEOMETRY, *more)
        assert run_here("ingest", source, *where, stdin=lines.encode() if stdin else b"").code == 0

    return ingest


def follow(recipe, here, file_id=FILE_ID):
    """Run the lines of a recipe, for the file `file_id`. Each ends with its stated exit code, or with 0."""
    for line in RECIPES[recipe].replace("$PWD", str(here)).replace(FILE_ID, file_id).splitlines():
        command, _, comment = line.partition("#")
        code = int(comment.removeprefix(" exit code ")) if comment else 0
        words = shlex.split(command)
        if words[0] == "tiered-index":
            done = run_here(*words[1:])
            assert done.code == code, (line, done)
        else:
            subprocess.run(words, cwd=here, check=True)


def count_found(here, place="store"):
    with IndexReader.open(f"file://{here}/{place}") as reader:
        answer = reader.query("orders", "order-1", max_count=100_000)
        assert answer.status == "complete"
        return len(answer)


def restored(folder, ingest, *how):
    ingest(100, *how)
    shutil.copytree(folder, "backup")
    ingest(200, "--wait")
    shutil.rmtree(folder)
    shutil.copytree("backup", folder)


def bucket_restored(here, ingest):
    restored("store", ingest, "--wait")


def root_restored(here, ingest):
    restored("root", ingest)


def machine_cloned(here, ingest):
    ingest(100)
    shutil.copytree("root", "clone")
    ingest(100, "--wait", root="clone", stdin=True)
    # these messages are not uploaded yet
    ingest(100, root="clone", stdin=True)


def host_gone(here, ingest):
    ingest(300, "--wait")
    with open_storage(STORE.format(here)) as storage:
        Lease(storage, 2, SystemClock(), 600.0, "elsewhere")


def storage_lost(here, ingest):
    ingest(100, "--wait")
    ingest(200)
    shutil.rmtree("store")


def region_lost(here, ingest):
    ingest(100, "--wait")
    assert run_here("copy", "--from", STORE.format(here), "--to", f"file://{here}/standby").code == 0
    ingest(200, "--wait")
    shutil.rmtree("root")


def region_back(here, ingest):
    region_lost(here, ingest)
    follow("A region is lost, a standby is promoted", here)


def uploaded(here, ingest):
    ingest(300, "--wait")


INCIDENTS = {
    "A bucket to a point in time": (bucket_restored, "store"),
    "A root from a backup": (root_restored, "store"),
    "A machine snapshot or a cloned disk": (machine_cloned, "store"),
    "A writer's host is gone": (host_gone, "store"),
    "The storage is lost, the root is alive": (storage_lost, "new-store"),
    "A region is lost, a standby is promoted": (region_lost, "standby"),
    "Fail back": (region_back, "store"),
    "A replica by other tools": (uploaded, "replica"),
}


@pytest.mark.parametrize("harm", ["damage", "loss"])
def test_a_lost_object_is_given_up_by_its_name(here, ingest, harm):
    ingest(100, "--wait")
    ingest(200, "--wait")
    lost, _ = sorted((here / "store").glob("data%/*/*.index"))
    file_id = lost.parent.name.rstrip("%")
    flip(lost, 40) if harm == "damage" else lost.unlink()
    with IndexReader.open(f"file://{here}/store") as reader, pytest.raises(CorruptFile):
        reader.query("orders", "order-1", max_count=1000)
    dry_run = ("recover", "--storage", STORE.format(here), "--lost", file_id, "--dry-run", "--json")
    entries = sum(lost_object["entries"] for lost_object in run_here(*dry_run).document["lost"])
    follow(GIVING_UP, here, file_id)
    assert (count_found(here), entries) == (200, 100)
    with IndexReader.open(f"file://{here}/store") as reader:
        answer = reader.query("orders", "order-1", max_count=1000)
        assert [(loss.file, loss.entries) for loss in answer.lost] == [(file_id, 100)]


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != GIVING_UP])
def test_a_recipe_loses_nothing(here, ingest, recipe):
    incident, place = INCIDENTS[recipe]
    incident(here, ingest)
    follow(recipe, here)
    assert count_found(here, place) == 300


def test_a_live_writer_that_a_person_takes_over_is_fenced_and_keeps_its_files(here, ingest):
    ingest(100, "--wait")
    where = ("--root", "other", "--storage", STORE.format(here))
    with IndexService.open(root=here / "root", background=False) as old:
        refused = run_here("ingest", "source.ndjson", *where, *GEOMETRY, "--wait")
        said = "`tiered-index recover --take-over`, with --root and --storage, does not wait"
        assert refused.code == 5 and said in refused.err
        assert "the writer is alive" in run_here("query", "orders", "order-1", *where[2:]).out
        assert run_here("recover", "--take-over", *where).code == 0
        old.put("orders", 0, "order-1", 1000, 9, 1_700_000_000_000)
        old.seal()
        with pytest.raises(WriterFenced):
            old.run_lifecycle()
    assert count_found(here) == 100
    assert run_here("recover", "--root", "root").code == 0
    ingest(1, "--wait")
    assert count_found(here) == 102
