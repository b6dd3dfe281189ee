"""A wrong command line ends with code 2 and says what is wrong, before anything is read, written or made."""

import json
import os
import shlex
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.integration.cli.command_lines import run_here
from tests.support.store_writer import StoreWriter
from tiered_index import IndexReader, IndexService
from tiered_index.cli.main import run
from tiered_index.connectors.rocketmq.log.store import StoreDirectory
from tiered_index.errors import ConfigError, InvalidArgument, StorageMisconfigured
from tiered_index.storage.opening import open_storage

NO_INDEX = "no index is given: pass --storage URI, --root DIR, or both"
ONE_INDEX = "only query, topics and serve read several"
SERVICE = "--url http://127.0.0.1:1"
LINES = [
    ("query", ""),
    ("query t k --nope", ""),
    ("query t k1 k2", "A query has one KEY: quote a key with blanks, and write several into a file"),
    ("nope", ""),
    ("vreify --storage {uri}", "Did you mean 'verify'?"),
    # values
    ("query t k --root {root} --max 0", "--max must be at least 1, not 0"),
    ("query t k --root {root} --timeout 0", "--timeout must be a positive number of seconds, not 0.0"),
    ("query t k --root {root} --max-bytes -1", "--max-bytes must be a whole number, 0 or more, not -1"),
    (
        "query t k --root {root} --begin 2024-01-01 --end 1",
        "--begin 2024-01-01T00:00:00Z is after --end 1970-01-01T00:00:00.001Z",
    ),
    ("query t k --timeout x", "Invalid value for '--timeout': must be a number"),
    ("ingest a --patience -1", "Invalid value for '--patience': must be at least 0"),
    ("ingest a --preset x", "Invalid value for '--preset': 'x' is not one of 'native', 'rocketmq'"),
    ("ingest {source} --root {tmp}/r --storage memory://m --slots 0", "--slots must be at least 1"),
    ("orphans --root {root} --older-than 1s", "--older-than must be at least 1h (3600 s), not 1 s: an upload may"),
    *((f"merge --storage {{uri}} --{option}", "") for option in ("window=x", "window=0", "window=99999999999d")),
    *((f"merge --storage {{uri}} --{option}", "") for option in ("window=1h,90m", "window=1d,", "shard-bytes=0")),
    *((f"merge --storage {{uri}} --{option}", "") for option in ("threads=0", "min-age=-1", "begin=soon")),
    *((f"expire --yes --storage {{uri}} --set retention.{rule}", "") for rule in ("age_s=soon", "age_s=365")),
    *((f"expire --yes --storage {{uri}} --set retention.{rule}", "") for rule in ("max_bytes=1GB", "topics.x=365")),
    ("expire --yes --storage {uri} --set retention.topics.x=1d --set 'retention.topics={{\"x\": \"2d\"}}'", ""),
    ("expire --yes --storage {uri} --set retention.age_s=1d --set retention.grace_s=1m", ""),
    # an index
    *((command, NO_INDEX) for command in ("query orders k1", "topics", "files")),
    *((command, "") for command in ("merge", "orphans", "verify", "doctor", "doctor nonsense")),
    ("erase --storage {uri}", ""),
    *((f"{command} --storage file://{{tmp}}/none", "holds no") for command in ("merge", "orphans")),
    ("recover --storage file://{tmp}/none", "no root is given: pass --root DIR"),
    ("query t k --storage {tmp}", "--storage: not a storage URI"),
    ("verify --root {tmp}", ""),
    ("verify --storage file://{tmp}", ""),
    ("recover --root {tmp}/none", ""),
    ("recover --root {tmp}/none --storage file://{tmp}/nothing", "holds no"),
    ("expire --storage {uri}", ""),
    ("files nowhere", ""),
    ("files --entries --root {root}", "--entries needs FILE"),
    *((f"{line} --storage {{uri}} --storage {{uri}}2", ONE_INDEX) for line in ("files", "verify", "recover")),
    *((f"{line} --storage {{uri}} --storage {{uri}}2", ONE_INDEX) for line in ("files x", "message x --topic t")),
    ("query t k --root {root} --storage {uri} --storage {uri}2", "without one"),
    # options that do not fit together
    ("query orders --storage {uri}", "give a TOPIC and a KEY, or --keys FILE"),
    ("query orders k --out x.parquet --storage {uri}", "needs --keys"),
    ("query orders --keys k.csv --storage {uri}", "leave TOPIC out"),
    ("query --keys k.csv --messages --out x.parquet --storage {uri}", "leave --out out"),
    ("query --keys absent.csv --storage {uri}", "absent.csv: No such file"),
    ("query --keys k.csv --out x.xls --storage {uri}", "--out x.xls: its name must end in .parquet or .ndjson"),
    ("query --keys {tmp}/k.csv --url http://localhost:1", "IndexClient.query_many"),
    ("query t k --storage {uri} --store {store}", ""),
    ("query t k --storage {uri} --body hex", ""),
    ("query t k --storage {uri} --raw", ""),
    ("query t k --storage {uri} --messages --store {tmp}/none", "is not a folder"),
    ("query t k --storage {uri} --messages --store redis://host/0", "no connector reads messages at redis://: install"),
    ("query t k --storage redis://host/0", "If another package reads such addresses, install it"),
    ("query t k --storage {uri} --messages --store {store}/commitlog", "is not a RocketMQ store"),
    ("query t k --storage {uri} --messages --body xml", ""),
    ("message no-id --store {store}", ""),
    ("message 00000000000000000000000000000000", ""),
    ("message 00000000000000000000000000000000 --store {store} --cursor x", "--topic"),
    ("message 00000000000000000000000000000000 --topic t --queue-id 0 --store {store}", ""),
    ("message --store {store}", ""),
    ("message key --topic t --store {store}", ""),
    ("message orders/0/0 --storage {uri}", "kafka:TOPIC/PARTITION/OFFSET, or --topic and a unique key"),
    ("erase --topic orders --storage {uri} --queue 1", ""),
    ("erase --topic orders --storage {uri} --queue 1 --key k1 --before 2026-01-01", ""),
    ("verify --storage {uri} --repair", ""),
    ("verify --storage {uri} --yes", ""),
    ("verify --storage {uri} --deep --source .", ""),
    ("verify --storage {uri} --deep --repair --source kafka://h:1/t", "it is Kafka"),
    ("verify --storage {uri} --deep --repair x.index", ""),
    ("verify --storage {uri} --deep --repair --from s3://key:PASSWORD@bucket/index", "--from"),
    ("copy --from {uri} --to {uri}", "is the source itself"),
    ("copy --from {uri}- --to file://{tmp}/b", "holds no"),
    ("copy --from {uri} --to file://{tmp}/b --follow --grace 1m", ""),
    ("topics --root {root} --by topic,size", ""),
    ("topics --by topic --storage {uri} --storage {uri}2", "--by sums the entries of one index"),
    ("topics --root {root} --by topic --begin 1", "--by sums all entries: leave --begin,"),
    ("merge --storage {uri} --threads 2 --master local", "leave --threads out"),
    ("export --root {root} --out {source}", "exists already"),
    ("export --root {root} --out {tmp}/no/e", "there is no folder"),
    ("export --root {root} --out {tmp}/e --slots 0", "needs --format rocketmq"),
    ("export --root {root} --out {tmp}/e --topic ' '", "topic is empty"),
    ("export --root {root} --out {tmp}/e --begin 5 --end 4", "is after"),
    ("export --root {root} --out {tmp}/e.csv", "an export is Parquet or NDJSON, which other tools turn into .csv"),
    ("export --root {root} --out {tmp}/e.csv.gz", "write `--out - | gzip > "),
    ("export --root {root} --out - --format rocketmq", ""),
    # a job of Spark, before Spark starts
    *((f"spark lookup --storage {{uri}} --keys none --out {out}", "already: answers are written to a") for out in
      ("{tmp}", "{uri}")),
    *((f"spark lookup --storage {{uri}} --out {{tmp}}/answers --keys {line}", said) for line, said in (
        ("{tmp}/none.csv", "none.csv: No such file or directory"),
        ("{tmp}/mixed", "keys are files of one kind, not of csv and ndjson"),
        ("{tmp}/keys.csv --begin 2 --end 1", "--begin 1970-01-01T00:00:00.002Z is after --end"),
        (f"{{tmp}}/keys.csv --max {2**31}", "--max is a whole number from 1 on"),
        ("{tmp}/keys.csv --messages {tmp}", "messages of a RocketMQ store are found by offsets in 'commitlog'"),
        ("{tmp}/keys.csv --messages archive", "the index has no archived messages"),
        ("{tmp}/keys.csv --messages {tmp}/keys.csv", "messages is 'archive', the folder of a RocketMQ store, or the"),
    )),
    ("spark lookup --storage file://{tmp}/none --out {tmp}/answers --keys {tmp}/keys.csv", "holds no tiered index"),
    # sources
    *((f"ingest {{tmp}}/gone {option} --root {{tmp}}/r --storage file://{{tmp}}/s", "gone: No such file") for option in
      ("", "--follow", "--archive-segments", "--key key")),
    *((f"ingest {{source}} {option} --root {{tmp}}/r --storage file://{{tmp}}/s", f"{option} is for ") for option in
      ("--follow", "--skip-corrupt", "--skip-missing", "--archive-queues", "--no-check-bodies")),
    ("ingest {tmp} --root {tmp}/r --storage file://{tmp}/s", ""),
    ("ingest {store} --skip-bad --root {tmp}/r --storage file://{tmp}/s", ""),
    ("ingest {source} --dry-run", ""),
    ("ingest {source} --column kee=k --root {tmp}/r --storage file://{tmp}/s", "--column: 'kee' is not a field of a"),
    ("ingest {source} --constant kee=k --root {tmp}/r --storage file://{tmp}/s", "--constant: 'kee' is not a field"),
    ("ingest archive:{uri} --storage {uri}", ""),
    ("ingest archive:{uri} --storage file://{tmp}/n --store-name x", ""),
    *((f"ingest archive:{{uri}} --storage file://{{tmp}}/n {option}", "") for option in
      ("", "--follow", "--restart", "--skip-bad", "--archive-segments")),
    # no command writes into a broker's folders
    *((f"ingest {{store}} --root {root} --storage file://{{tmp}}/objects", "choose a root beside it") for root in
      ("{store}", "{store}/deep/root", "{store}/..", "{tmp}/link/root")),
    *((f"ingest {{store}} --root {{tmp}}/root --storage {storage}", "choose another place") for storage in
      ("file://{store}/objects", "FILE://localhost{store}/../st%6Fre", "sqlite://{store}/index.db")),
    # a terminal of Latin-1 gives keys that no index has
    *((line, "is not UTF-8") for line in (
        "query orders {latin} --storage {uri}",
        "erase --topic orders --key k --key {latin} --yes --now --storage {uri}",
        "ingest kafka://127.0.0.1:1/{latin} --storage {uri}",
        "ingest no-such-file.ndjson --constant topic={latin} --storage {uri}",
        "copy --to file:///tmp/{latin} --storage {uri}",
        "token {latin} --file {tmp}/tokens.json",
    )),
    # a service
    *((f"serve --storage {{uri}} --rocketmq-{option}", "need --rocketmq-port") for option in
      ("keys k.json", "cluster a", "broker b", "advertise c:1")),
    ("serve --storage {uri} --port 0 --rocketmq-port 0 --rocketmq-advertise nonsense", "give HOST:PORT"),
    # a service has the index
    (f"query a k --root /tmp/x {SERVICE}", "leave --root out"),
    (f"query a k --messages --store /tmp/x {SERVICE}", "leave --store out"),
    (f"query a k --messages --kafka bootstrap.servers=x {SERVICE}", "leave --kafka out"),
    (f"query a k --config index.toml {SERVICE}", "leave --config out"),
    (f"topics --storage memory://x {SERVICE}", "leave --storage out"),
    (f"verify file {SERVICE}", "leave FILES out"),
    (f"files file {SERVICE}", "leave FILE out"),
    (f"verify --deep --repair {SERVICE}", "leave --repair out"),
]  # fmt: skip


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    with StoreWriter(tmp_path_factory.mktemp("broker") / "store") as writer:
        writer.put("orders", 0, keys="k", uniq_key="U")
    return writer.root


def contents(*folders):
    """Return what each file holds, of large ones the size and the time of the last write."""

    def of_file(path):
        told = path.stat()
        return path.read_bytes() if told.st_size < 1 << 20 else (told.st_size, told.st_mtime_ns)

    return {path: of_file(path) if path.is_file() else None for each in folders for path in each.rglob("*")}


@pytest.mark.parametrize(("line", "said"), LINES, ids=lambda value: value[:60])
def test_a_wrong_command_line_is_refused_and_changes_nothing(original, store, tmp_path, monkeypatch, line, said):
    monkeypatch.setattr("tiered_index.cli.spark.lookup.spark_of", None)
    places = {"root": original.root, "uri": original.uri, "source": original.source, "store": store, "tmp": tmp_path}
    places["latin"] = os.fsdecode(b"caf\xe9")
    (tmp_path / "link").symlink_to(store)
    (tmp_path / "keys.csv").write_text("topic,key\n")
    (tmp_path / "mixed").mkdir()
    for name in ("a.csv", "b.ndjson"):
        (tmp_path / "mixed" / name).write_text("x")
    before = contents(original.folder, store, tmp_path)
    done = run_here(*shlex.split(line.format(**places)), "--json")
    assert (done.code, done.out) == (2, ""), done.err
    assert done.error["exit_code"] == 2 and said in done.error["message"]
    assert "PASSWORD" not in done.err
    assert contents(original.folder, store, tmp_path) == before


def test_files_of_the_caller_may_have_any_name(tmp_path):
    message = {"topic": "t", "key": "k", "queue_id": 0, "offset": 1, "size": 1, "timestamp_ms": 1_700_000_000_000}
    (file := tmp_path / os.fsdecode(b"caf\xe9.ndjson")).write_text(json.dumps(message) + "\n")
    done = run_here("ingest", file, "--root", tmp_path / "root", "--storage", f"file://{tmp_path}/storage", "--json")
    assert (done.code, done.document["entries"]) == (0, 1), done.err


ID = "7F00000100002A9F0000000000000000"
# too long, of nobody's home, with NUL, and a link to itself
PATHS = ("x" * 256, "/".join(["d" * 199] * 30), "~nobody-is-called-so/x", "a\0b", "loop")
OF_FILES = ("files {}", "verify {}")
OF_SOURCES = ("ingest {} --root new", f"message {ID} --store {{}}", "query t k --config {}")
OF_ROOTS = [
    f"{line} --root {{}} --storage memory://p"
    for line in ("query t k", "verify", "recover", f"message {ID}", "ingest in.ndjson")
]
# command lines, and possible paths that are wrong there
OF_PATHS = [
    *((line, ()) for line in (*OF_FILES, *OF_SOURCES)),
    # possible names of an object
    *(
        (f"{line} --root root --storage memory://p", (".", "in.ndjson/x", "000000000001000-572d230f6127"))
        for line in OF_FILES
    ),
    *((line, ("in.ndjson/x",)) for line in OF_ROOTS),
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("pool")
    (tmp_path / "pool").symlink_to("loop")
    (tmp_path / "in.ndjson").write_text(
        '{"topic":"t","queue_id":0,"keys":["k"],"offset":1,"size":1,"timestamp_ms":1700000000000}\n'
    )
    return tmp_path


def refusal(line, path):
    """Return the exit code of a command line with a path, which prints nothing but its error."""
    done = run_here(*(word.replace("{}", path) for word in line.split()))
    assert done.err and not done.out and "unexpected" not in done.err, (line, path, done)
    return done.code


@pytest.mark.parametrize(("line", "more"), OF_PATHS)
def test_an_impossible_path_is_bad_usage(folder, line, more):
    assert {path: refusal(line, path) for path in (*PATHS, *more)} == dict.fromkeys((*PATHS, *more), 2)


def test_a_folder_that_may_not_be_entered_is_an_error_of_the_set_up(folder, capsys):
    (folder / "locked").mkdir(0)
    before = os.geteuid()
    if before == 0:
        os.seteuid(65534)
    try:
        for line in (*OF_FILES, *OF_SOURCES, *OF_ROOTS):
            with pytest.raises(SystemExit, match=str(StorageMisconfigured.exit_code)):
                run(line.replace("{}", f"{folder}/locked/x").split())
            assert "unexpected" not in capsys.readouterr().err, line
    finally:
        os.seteuid(before)


@pytest.mark.parametrize("path", PATHS)
def test_an_impossible_path_is_refused_by_calls_and_in_uris(folder, path):
    for call in (
        lambda: IndexService.open(root=path, storage="memory://p"),
        lambda: IndexReader.open(root=path),
        lambda: IndexReader.open("memory://p", cache_dir=path),
        lambda: StoreDirectory.open(Path(path)),
    ):
        with pytest.raises((ConfigError, InvalidArgument)):
            call()
    # an absolute path needs no home folder
    for scheme in () if path.startswith("~") else ("file", "sqlite"):
        uri = f"{scheme}://{folder}/{quote(path)}"
        with pytest.raises(ConfigError):
            open_storage(uri)
        assert refusal(f"verify --storage {uri}", "") == refusal(f"recover --root new --storage {uri}", "") == 2
