"""`verify` finds every kind of damage, names its place, and exits with 1. An intact index passes, also with --deep."""

import json
import re
import zlib

from tests.support.damage import flip
from tiered_index.service.log.records import digest_of


def findings(outcome):
    assert outcome.code == 1, outcome
    assert outcome.document["status"] == "findings"
    return outcome.document["findings"]


def test_damage_of_local_files_is_found_by_root_and_by_path(run_here, damaged):
    uploaded, unsealed = damaged.files("uploaded")[1], damaged.files("unsealed")[0]
    for path, place, part, problem in (
        (uploaded, uploaded.stat().st_size // 2, "run", ""),
        (unsealed, 28 + 8 * 64 + 36 * 20, None, "CRC32"),
    ):
        flip(path, place)
        for arguments in (("--root", damaged.root), (path,)):
            (finding,) = findings(run_here("verify", *arguments, "--json"))
            assert (finding["file"], finding["part"] == part or part is None) == (str(path), True)
            assert finding["offset"] is not None and problem in finding["problem"]
        flip(path, place)
    unsealed.with_suffix(".journal").unlink()
    # leftover files are notes
    (damaged.objects()[0].parent / "0123456789abcdef.index").write_bytes(b"orphan")
    (damaged.root / "compacted" / ".tmp-0123456789abcdef").write_bytes(b"half")
    outcome = run_here("verify", "--root", damaged.root, "--json")
    (finding,) = findings(outcome)
    assert (finding["file"], finding["part"], len(outcome.document["notes"])) == (str(unsealed), "journal", 2)
    assert "run it again with --deep --repair" in run_here("verify", "--root", damaged.root).err
    assert "`tiered-index verify --deep --repair --root" in run_here("recover", "--root", damaged.root).err


def test_a_flipped_bit_in_an_object_is_found_by_deep(run_here, damaged):
    path = damaged.objects()[0]
    place = path.stat().st_size // 2
    flip(path, place)
    assert run_here("verify", "--root", damaged.root, "--json").code == 0
    damages = findings(run_here("verify", "--deep", "--root", damaged.root, "--json"))
    assert {f["part"] for f in damages} == {"run", "copy"}
    assert [f["offset"] for f in damages if f["part"] == "copy"] == [place]
    assert {f["part"] for f in findings(run_here("verify", "--deep", "--storage", damaged.uri, "--json"))} == {"run"}


def test_objects_that_are_gone_short_or_others_and_a_damaged_log_record(run_here, damaged):
    first, second, third = damaged.objects()[:3]
    first.unlink()
    second.write_bytes(second.read_bytes()[:-1])
    other = damaged.objects()[-1].read_bytes()
    third.write_bytes(other[: third.stat().st_size].ljust(third.stat().st_size, b"\0"))
    damages = findings(run_here("verify", "--root", damaged.root, "--json"))
    assert [f["part"] for f in damages] == ["object"] * 3
    assert any("does not have it" in f["problem"] for f in damages)
    record = damaged.objects("log")[3]
    flip(record, 20)
    (finding,) = findings(run_here("verify", "--storage", damaged.uri, "--json"))
    assert (finding["file"], finding["part"]) == (f"log/{record.name}", "log")
    record.unlink()
    (finding,) = findings(run_here("verify", "--storage", damaged.uri, "--json"))
    assert "missing" in finding["problem"]


def test_a_lost_object_is_named_then_given_up(run_here, damaged):
    path, *others = damaged.objects()
    name, file = f"data/{path.parent.name[:-1]}/{path.name}", path.parent.name[:-1]
    command = ("query", "orders", "k1", "--storage", damaged.uri, "--max", 1000)
    whole = run_here(*command, "--json").document["items"]
    path.unlink()
    assert run_here(*command).code == 4 and "--allow-partial (allow_partial=True)" in run_here(*command).err
    verified = run_here("verify", "--root", damaged.root, "--json")
    (missing,) = verified.document["missing"]
    assert (verified.code, missing["object"], missing["topics"]) == (1, name, ["orders", "payments"])
    assert missing["copy"] == str(damaged.root / "uploaded" / f"{file}.index")
    loss = {key: missing[key] for key in ("file", "begin_ms", "end_ms", "entries")} | {"source": None, "reason": None}
    rows = ("object", name), ("file", file), ("begin", r"20\S+"), ("end", r"20\S+"), ("entries", f"{loss['entries']:,}")
    shown = re.compile("".join(f"  {label} +{value}\n" for label, value in rows))
    for form in ((), ("--entries",)):
        inspected = run_here("files", file, *form, "--storage", damaged.uri)
        assert inspected.code == 4 and name in inspected.err and "the log names" in inspected.err
    assert run_here("recover", "--storage", damaged.uri, "--lost", others[0].parent.name[:-1]).code == 2
    refused = run_here("merge", "--storage", damaged.uri)
    assert refused.code == 4 and name in refused.err and "--skip-lost" in refused.err
    planned = run_here("recover", "--storage", damaged.uri, "--lost", name, "--dry-run", "--json").document
    assert (planned["status"], len(planned["lost"])) == ("planned", 1)
    assert run_here("verify", "--storage", damaged.uri).code == 1
    assert shown.search(run_here("recover", "--storage", damaged.uri, "--lost", name).out)
    answered = run_here(*command, "--json")
    assert (answered.code, answered.document["status"], answered.document["lost"]) == (0, "complete", [loss])
    missed = [item["timestamp_ms"] for item in whole if item not in answered.document["items"]]
    assert missed and loss["begin_ms"] <= min(missed) <= max(missed) <= loss["end_ms"]
    assert "found, complete except 20" in run_here(*command).out
    outside = run_here(*command, "--begin", loss["end_ms"] + 1000).out
    assert "complete" in outside and "except" not in outside
    verified = run_here("verify", "--storage", damaged.uri)
    assert verified.code == 0 and shown.search(verified.out)
    assert run_here("merge", "--storage", damaged.uri).code == 0


def test_a_log_that_contradicts_the_local_copies(run_here, damaged):
    changed, previous = False, None
    # the later records name it, so all are written again: any holder of the storage's keys can do that
    for path in sorted(damaged.objects("log")):
        body = json.loads(path.read_bytes().rpartition(b"\n#crc32 ")[0])
        if body["kind"] == "publish" and not changed:
            body["add"][0]["second_max"] += 1
            changed = True
        if previous is not None and "previous" in body:
            body["previous"] = previous
        text = json.dumps(body, separators=(",", ":")).encode()
        data = text + b"\n#crc32 " + f"{zlib.crc32(text):08x}\n".encode()
        path.write_bytes(data)
        previous = digest_of(data)
    contradictions = findings(run_here("verify", "--root", damaged.root, "--json"))
    assert {f["part"] for f in contradictions} == {"object", "copy", "checkpoint", "log"}


def test_a_storage_of_another_index_is_found(run_here, original, tmp_path):
    """A restore may name the wrong one. Other commands refuse it, and a copy of the index is no other one."""
    other, copied = f"file://{tmp_path}/other", f"file://{tmp_path}/copied"
    ingested = run_here("ingest", original.source, "--root", tmp_path / "root", "--storage", other, "--wait")
    assert ingested.code == 0, ingested.err
    where = ("--root", original.root, "--storage")
    for more in ((), ("--deep", "--repair", "--yes")):
        (finding,) = findings(run_here("verify", *where, other, "--json", *more))
        assert (finding["file"], finding["part"]) == (other, "log") and "it is of index " in finding["problem"]
    assert run_here("copy", "--from", original.uri, "--to", copied).code == 0
    assert run_here("verify", *where, copied).code == 0


def test_no_file_is_changed(run_here, damaged):
    def everything():
        return {path: path.read_bytes() for path in damaged.folder.rglob("*") if path.is_file()}

    before = everything()
    for arguments in (("verify", "--deep"), ("files",), ("query", "orders", "k1")):
        assert run_here(*arguments, "--root", damaged.root).code == 0
    assert everything() == before


def test_a_storage_that_is_away_is_not_a_finding(run_here, damaged):
    away = "s3://bucket/x?endpoint_url=http://127.0.0.1:9"
    environment = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1"}
    environment["TIERED_INDEX_S3"] = json.dumps({"max_attempts": 1, "connect_timeout_s": 1})
    outcome = run_here("verify", "--root", damaged.root, "--storage", away, "--json", environment=environment)
    assert (outcome.code, outcome.document["status"]) == (3, "incomplete")
    assert outcome.document["unchecked"][0]["type"] == "StorageUnavailable"
    flip(damaged.files("uploaded")[0], 600)
    outcome = run_here("verify", "--root", damaged.root, "--storage", away, "--json", environment=environment)
    assert (outcome.code, outcome.document["status"]) == (1, "findings")
    outcome = run_here("query", "orders", "k1", "--storage", away, "--json", environment=environment)
    assert (outcome.code, outcome.error["exit_code"]) == (3, 3)
