"""`verify --deep --repair` restores objects, `recover --lost` gives others up, `ingest archive:URI` starts again."""

import json
import shutil
from pathlib import Path

import pytest

from tests.rocketmq import golden_store
from tests.support.damage import flip
from tests.support.storage_faults import FaultStorage
from tiered_index import IndexReader, config
from tiered_index.connectors.rocketmq.archive.messages import RocketmqMessages

SMALL = ("--slots", 97, "--items", 150)


@pytest.fixture(scope="module")
def archived(run_here, tmp_path_factory):
    """An index that followed the golden store and archived its closed segments."""
    folder = tmp_path_factory.mktemp("archived")
    store = golden_store.unpack(folder / "broker")
    where = ("--root", folder / "root", "--storage", f"file://{folder}/store", "--store-name", "b")
    done = run_here("ingest", store, *where, *SMALL, "--archive-segments", "--wait", "--json")
    assert done.code == 0, done.err
    return folder


@pytest.fixture
def place(archived, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(archived, folder)
    marker = folder / "root" / "tiered_index.json"
    marker.write_text(marker.read_text().replace(str(archived), str(folder)))
    return folder


def objects(folder: Path) -> list[Path]:
    return sorted((folder / "store" / "data%").rglob("*.index"))


def test_repairs_are_listed_then_done(run_here, damaged):
    first, second, *_ = damaged.objects()
    flip(first, first.stat().st_size // 2)
    second.unlink()
    copy = damaged.files("uploaded")[-1]
    flip(copy, copy.stat().st_size // 2)
    where = ("verify", "--deep", "--repair", "--root", damaged.root)
    before = sorted(path.read_bytes() for path in damaged.objects("log"))
    planned = run_here(*where, "--json")
    assert planned.code == 1 and not planned.document["repaired"]
    assert [repair["action"] for repair in planned.document["repairs"]] == ["restore", "restore", "drop"]
    assert sorted(path.read_bytes() for path in damaged.objects("log")) == before
    assert "pass --yes to apply" in run_here(*where).err
    done = run_here(*where, "--yes", "--json")
    assert done.code == 0 and done.document["not_repaired"] == [], done.document
    assert (planned.document["status"], done.document["status"]) == ("findings", "repaired")
    assert run_here("verify", "--deep", "--root", damaged.root).code == 0
    again = run_here(*where, "--yes")
    assert again.code == 0 and again.out.splitlines()[-1].endswith("0 findings left after 0 repairs")
    assert run_here("recover", "--root", damaged.root).code == 0


def test_a_root_with_a_damaged_copy_gives_up_the_object_and_with_a_whole_one_does_not(run_here, damaged):
    first, *_ = damaged.objects()
    first.unlink()
    file_id = first.parent.name.rstrip("%")
    (copy,) = [path for path in damaged.files("uploaded") if path.stem == file_id]
    where = ("recover", "--root", damaged.root, "--lost", file_id, "--json")
    refused = run_here(*where)
    assert refused.code == 2 and "the root has a copy" in refused.error["message"]
    flip(copy, copy.stat().st_size // 2)
    left = run_here("verify", "--deep", "--repair", "--yes", "--root", damaged.root, "--json").document["not_repaired"]
    assert f"data/{file_id}/{first.name}" in {finding["file"] for finding in left}
    done = run_here(*where)
    assert done.code == 0 and [lost_object["file"] for lost_object in done.document["lost"]] == [file_id], done
    answer = run_here("query", "orders", "k1", "--storage", damaged.uri, "--max", 1000, "--json").document
    assert answer["status"] == "complete" and answer["lost"]


def test_a_copied_index_has_the_lost_objects(run_here, damaged, tmp_path):
    copy = f"file://{tmp_path}/standby"
    assert run_here("copy", "--from", damaged.uri, "--to", copy).code == 0
    first, *_ = damaged.objects()
    first.unlink()
    where = ("verify", "--deep", "--repair", "--yes", "--storage", damaged.uri)
    done = run_here(*where, "--from", copy, "--json")
    assert (done.code, [repair["action"] for repair in done.document["repairs"]]) == (0, ["restore"]), done.err
    assert done.document["repairs"][0]["source"].startswith(copy)
    assert run_here("verify", "--deep", "--storage", damaged.uri).code == 0


def test_archived_segments_are_put_back_and_lost_files_are_given_up(run_here, place):
    """A source restores segments. Entries are never made from its messages: the lost ones are reported."""
    first, second, *_ = sorted((place / "store" / "segments%").rglob("*.log"))
    flip(first, 5000)
    second.unlink()
    objects(place)[0].unlink()
    shutil.rmtree(place / "root")
    where = ("verify", "--deep", "--repair", "--storage", f"file://{place}/store", "--json")
    alone = run_here(*where)
    left = {Path(finding["file"]).name for finding in alone.document["not_repaired"]}
    assert alone.code == 1 and left >= {first.name, second.name}
    notes = run_here(*where, "--source", place / "broker").document["notes"]
    assert any("archived segments of 'b'" in note and "--store-name" in note for note in notes), notes
    more = ("--source", place / "broker", "--store-name", "b")
    planned, done = run_here(*where, *more), run_here(*where, *more, "--yes")
    actions = [[repair["action"] for repair in run.document["repairs"]] for run in (planned, done)]
    assert actions == [["restore", "restore"]] * 2
    (left,) = done.document["not_repaired"]
    lost = run_here("recover", "--storage", f"file://{place}/store", "--lost", left["file"], "--json")
    (missing,) = lost.document["lost"]
    assert missing["entries"] and missing["begin_ms"] <= missing["end_ms"]
    assert run_here("verify", "--deep", "--storage", f"file://{place}/store").code == 0


def test_segments_without_a_copy_are_given_up_by_name(run_here, place, tmp_path):
    """Everything else is then copied, and answers name the lost segments as missing. The source restores them."""
    segments = sorted((place / "store" / "segments%").rglob("*.log"))
    flip(segments[1], 5000)
    uri, copy = f"file://{place}/store", f"file://{tmp_path}/target"
    left = run_here("verify", "--deep", "--repair", "--storage", uri, "--yes", "--json")
    (name,) = {finding["file"] for finding in left.document["not_repaired"]}
    assert left.code == 1 and name.endswith(segments[1].name)
    lost = ("recover", "--storage", uri, "--lost", name, "--json")
    planned = run_here(*lost, "--dry-run").document
    assert run_here("copy", "--from", uri, "--to", copy).code == 4
    assert run_here(*lost).document["segments"] == planned["segments"]
    assert [segment["object"] for segment in planned["segments"]] == [name]
    assert run_here(*lost).code == 2
    assert run_here("copy", "--from", uri, "--to", copy).code == 0
    checked = run_here("verify", "--deep", "--storage", uri, "--json").document
    assert checked["status"] == "ok" and any("gave up the archived segment of b" in note for note in checked["notes"])
    begin = golden_store.SEGMENT_BYTES
    with IndexReader.open(uri) as reader:
        source = RocketmqMessages(None, reader.segment_archive)
        inside, before = source.at(begin), source.at(0)
    assert (inside.state, before.state) == ("missing", "archived") and "a record removed it" in inside.problem
    more = ("--root", place / "root", "--storage", uri, "--store-name", "b", "--archive-segments", "--wait")
    assert run_here("ingest", place / "broker", *more).code == 0
    with IndexReader.open(uri) as reader:
        assert RocketmqMessages(None, reader.segment_archive).at(begin).state == "archived"


def test_a_lost_catalog_is_given_up_by_name_and_its_source_restores_it(run_here, place, tmp_path):
    uri, copy = f"file://{place}/store", ("copy", "--from", f"file://{place}/store", "--to", f"file://{tmp_path}/copy")
    assert run_here("merge", "--storage", uri).code == 0
    (catalog,) = (place / "store" / "catalog%").iterdir()
    name = f"catalog/{catalog.name}"
    lost = ("recover", "--storage", uri, "--lost", name, "--json")
    assert (run_here(*lost).code, "are whole" in run_here(*lost).error["message"]) == (2, True)
    catalog.unlink()
    listed = run_here("verify", "--deep", "--repair", "--storage", uri, "--yes")
    assert listed.code == 1 and "`tiered-index recover --lost NAME`" in listed.err
    rows = [{"object": name, "store": "b", "offsets": f"0 to {5 * golden_store.SEGMENT_BYTES - 1:,}", "segments": 5}]
    planned = run_here(*lost, "--dry-run").document
    assert (planned["status"], planned["lost_segments"], planned["catalogs"]) == ("planned", 5, rows)
    assert run_here(*copy).code == 4, "a dry run changes nothing"
    assert run_here(*lost).document["catalogs"] == rows and run_here(*copy).code == 0
    checked = run_here("verify", "--deep", "--storage", uri, "--json").document
    note = f"{name} was given up: messages of up to 5 segments of 1 logs are lost"
    assert checked["status"] == "ok" and note in checked["notes"]
    with IndexReader.open(uri) as reader:
        shown = RocketmqMessages(None, reader.segment_archive).at(0)
    assert shown.state == "missing" and f"{name}, which listed segments of b" in shown.problem
    more = ("--root", place / "root", "--storage", uri, "--store-name", "b", "--archive-segments", "--wait")
    assert run_here("ingest", place / "broker", *more).code == 0
    with IndexReader.open(uri) as reader:
        assert RocketmqMessages(None, reader.segment_archive).at(0).state == "archived"


@pytest.mark.parametrize("wrong", ["nothing", "another", "no store", "empty"])
def test_places_without_copies_are_refused_by_name(run_here, damaged, archived, tmp_path, wrong):
    """The command refuses them before it reads or changes anything, since a mistyped place has no copies."""
    damaged.objects()[0].unlink()
    where = ("verify", "--deep", "--repair", "--yes", "--storage", damaged.uri)
    uri = {"nothing": f"file://{tmp_path}/none", "another": f"file://{archived}/store", "empty": ""}
    origin = ("--source", tmp_path) if wrong == "no store" else ("--from", uri[wrong])
    done = run_here(*where, *origin, "--json")
    message = json.loads(done.err.splitlines()[-1])["error"]["message"]
    assert done.code == 2 and (str(tmp_path) if wrong == "no store" else "--from") in message, message
    assert run_here("verify", "--storage", damaged.uri).code == 1


def of_archive(run_here, old, code=0, *more):
    """Return the entries and the checksum that the archive of an index gives."""
    outcome = run_here("ingest", f"archive:{old}", "--dry-run", "--json", *more)
    assert outcome.code == code, outcome.err
    return outcome.document["archive"]


def of_index(run_here, uri, tmp_path):
    out = tmp_path / f"sums-{len([*tmp_path.iterdir()])}.parquet"
    report = run_here("export", "--storage", uri, "--out", out, "--json").document
    return {name: report[name] for name in ("entries", "checksum")}


def test_an_index_of_an_archive_is_the_one_that_was_followed(run_here, archived, tmp_path):
    old, new = f"file://{archived}/store", f"file://{tmp_path}/new"
    built = run_here("ingest", f"archive:{old}", "--storage", new, "--json")
    assert built.code == 0, built.err
    assert of_index(run_here, new, tmp_path) == of_archive(run_here, old)
    assert built.document["entries"] > 0
    assert built.document["segments"] == 5
    again = run_here("ingest", f"archive:{old}", "--storage", new, "--json")
    assert (again.code, again.document["entries"], again.document["messages"]) == (0, 0, 0)
    (source,) = built.document["stores"].values()
    assert again.document["stores"]["b"]["resumed_from"] == source["end"]
    assert run_here("verify", "--deep", "--storage", new).code == 0


def test_an_index_of_an_archive_brings_back_nothing_that_was_erased(run_here, place, tmp_path):
    old, new = f"file://{place}/store", f"file://{tmp_path}/new"
    whole = run_here("ingest", f"archive:{old}", "--storage", f"file://{tmp_path}/whole", "--json").document
    assert run_here("erase", "--storage", old, "--topic", "TopicPay", "--yes").code == 0
    built = run_here("ingest", f"archive:{old}", "--storage", new, "--json")
    assert built.code == 0 and of_index(run_here, new, tmp_path) == of_archive(run_here, old), built.err
    assert built.document["expired"] == whole["entries"] - built.document["entries"] > 0
    # nor does the store that the new index then follows
    follow = ("ingest", place / "broker", "--root", tmp_path / "root", "--storage", new, *SMALL, "--store-name", "b")
    assert run_here(*follow, "--wait").code == 0
    exported = tmp_path / "entries.ndjson"
    assert run_here("export", "--storage", new, "--format", "ndjson", "--out", exported).code == 0
    topics = {json.loads(line)["topic"] for line in exported.read_text().splitlines()}
    assert "TopicPay" not in topics and "TopicOrder" in topics


@pytest.mark.parametrize("root", [True, False])
@pytest.mark.parametrize("calls", [(29, 37), pytest.param(range(1, 60), marks=pytest.mark.slow)], ids=["some", "all"])
def test_a_run_over_an_archive_whose_storage_fails_at_a_call_continues(
    run_here, archived, tmp_path, monkeypatch, calls, root
):
    open_storage, archive = config.open_storage, of_archive(run_here, f"file://{archived}/store")
    for nth in calls:
        new = f"file://{tmp_path}/{nth}/new"

        def mortal(uri, *, new=new, nth=nth, **more):
            storage = FaultStorage(open_storage(uri, **more))
            if uri == new:
                storage.fail("*", nth=nth, times=None)
            return storage

        where = ["ingest", f"archive:file://{archived}/store", "--storage", new, "--json", "--patience", 0, *SMALL]
        where += ["--root", tmp_path / str(nth) / "root", "--wait"] if root else []
        with monkeypatch.context() as patched:
            patched.setattr(config, "open_storage", mortal)
            run_here(*where)
        shutil.rmtree(tmp_path / str(nth) / "new" / "lease%", ignore_errors=True)  # as if it had ended
        done = run_here(*where)
        if done.code == 2:
            assert not root and "interrupted run" in done.err
        else:
            assert done.code == 0, (nth, done.err)
            assert of_index(run_here, new, tmp_path) == archive


def test_a_segment_that_is_missing_in_between_is_never_passed_over_unsaid(run_here, place, tmp_path):
    segments = sorted((place / "store" / "segments%").rglob("*.log"))
    flip(segments[1], 5000)
    where = ("ingest", f"archive:file://{place}/store", "--storage", f"file://{tmp_path}/new")
    advice = "un `tiered-index verify --deep` to list the damage, and `verify --deep --repair` to mend it"
    stopped = run_here(*where, "--strict")
    assert stopped.code == 4 and "CRC32" in stopped.err and advice in stopped.err
    assert run_here(*where[:3], f"file://{tmp_path}/strict", "--strict").code == 4
    shown = run_here(*where[:3], f"file://{tmp_path}/shown")
    assert shown.code == 1 and "CRC32" in shown.err and advice in shown.err
    named = run_here(*where[:3], f"file://{tmp_path}/named", "--json")
    assert named.code == 1
    passed = run_here(*where, "--skip-corrupt", "--json")
    assert passed.code == 0 and of_archive(run_here, f"file://{place}/store", 1, "--skip-corrupt")
    assert passed.document["skipped"] == named.document["skipped"] != []
    assert passed.document["messages"] == named.document["messages"] > 0
    # lookups name what is missing
    assert "are damaged" in run_here("query", "TopicOrder", "none", "--storage", where[3]).out
    # given up: a comparison leaves out the entries that no archived segment has
    old, new = f"file://{place}/store", f"file://{tmp_path}/without"
    damaged = run_here("verify", "--deep", "--storage", old, "--json").document["findings"]
    assert run_here("recover", "--storage", old, "--lost", damaged[0]["file"]).code == 0
    done = run_here("ingest", f"archive:{old}", "--storage", new, "--skip-missing", "--json")
    assert done.code == 0 and done.document["skipped"], done
    assert of_index(run_here, new, tmp_path) == of_archive(run_here, old, 0, "--skip-missing")


def test_segments_whose_objects_are_gone_are_named_and_the_others_are_indexed(run_here, place, tmp_path):
    objects = sorted((place / "store" / "segments%").rglob("*.log"))
    objects[1].unlink()
    where = ("ingest", f"archive:file://{place}/store", "--storage")
    done = run_here(*where, f"file://{tmp_path}/new", "--json")
    (gap,) = done.document["skipped"]
    assert done.code == 1 and done.document["messages"] > 0
    assert objects[1].stem in gap["problem"] and "the storage does not have it" in gap["problem"]
    for path in objects[2:] + objects[:1]:
        path.unlink()
    assert run_here(*where, f"file://{tmp_path}/none").code == 4


def test_archived_rows_of_files_beside_a_store_are_indexed_with_it(run_here, place, tmp_path):
    (rows := tmp_path / "rows.ndjson").write_text('{"k": "a", "at": 1700000000}\n')
    where = ("--root", place / "root", "--storage", f"file://{place}/store")
    more = ("--topic", "rows", "--key", "k", "--time", "at", "--archive", "--wait", "--json")
    assert run_here("ingest", rows, *more, *where).document["entries"] == 1
    done = run_here("ingest", f"archive:file://{place}/store", "--storage", f"file://{tmp_path}/new", "--json")
    assert done.code == 0 and {*done.document["stores"]} == {"b", "rows:-/rows/0"}, done.err
    assert len(run_here("query", "rows", "a", "--storage", f"file://{tmp_path}/new", "--json").document["items"]) == 1


def test_an_archive_is_indexed_into_an_empty_place_beside_it(run_here, place, original, tmp_path):
    store = place / "store"
    (tmp_path / "link").symlink_to(store)
    before = {path: path.read_bytes() for path in store.rglob("*") if path.is_file()}
    for target in (f"{store}/", f"{tmp_path}/link", f"{tmp_path}/link/data"):
        done = run_here("ingest", f"archive:file://{store}", "--storage", f"file://{target}")
        assert done.code == 2 and "the index of these segments" in done.err, (target, done)
    assert run_here("ingest", f"archive:file://{store}", "--root", place / "root").code == 2
    another = ("--storage", original.uri, "--slots", 64, "--items", 1500)
    assert run_here("ingest", f"archive:file://{store}", *another).code == 2
    assert {path: path.read_bytes() for path in store.rglob("*") if path.is_file()} == before
    # a name that only begins alike is another place
    assert run_here("ingest", f"archive:file://{store}", "--storage", f"file://{store}-2").code == 0


def test_a_comparison_of_several_stores_is_refused_before_the_work(run_here, place):
    old = f"file://{place}/store"
    more = ("--root", place / "root", "--storage", old, "--store-name", "c", "--restart", "--archive-segments")
    assert run_here("ingest", place / "broker", *more, "--wait").code == 0
    done = run_here("ingest", f"archive:{old}", "--dry-run", "--json")
    assert (done.code, "--dry-run" in done.error["message"]) == (2, True)
