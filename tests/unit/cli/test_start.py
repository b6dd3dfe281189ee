"""Every command loads only the modules that it needs. Streams may be closed or full."""

import json
import re
import subprocess
import sys

import pytest

from docs.generators.reference import all_commands
from tests.support.loaded import loaded
from tiered_index import IndexService
from tiered_index.cli.declaring import command
from tiered_index.cli.main import alone, run
from tiered_index.cli.session import Session
from tiered_index.storage.disk import Disk

# the modules of this package that every command line loads. --version and the list of commands load no more
OF_EVERY_LINE = (
    *("base", "base.version", "cli", "cli.__main__", "cli.exit_codes", "cli.loading", "cli.main", "cli.output"),
    *("base.encoding", "base.tracing", "base.units", "errors"),
)
# and those of the help of commands: how options are declared, and the specs of connectors
HELP = (
    *("cli.declaring", "cli.write.options", "cli.options", "connectors", "connectors.options"),
    *("connectors.registry", "connectors.kafka", "connectors.kafka.spec", "connectors.rocketmq"),
    *("connectors.rocketmq.spec", "connectors.files", "connectors.files.spec"),
)
GROUPS = ("keep", "look_up", "operate", "spark", "write")
COMMANDS = {f"tiered_index.cli.{group}{module}" for group in GROUPS for module in ("", ".commands")}
ALWAYS = {"tiered_index", *(f"tiered_index.{name}" for name in OF_EVERY_LINE)}
HEAVY = {
    "asyncio",
    "boto3",
    "botocore",
    "opentelemetry",
    "pandas",
    "pyarrow",
    "pydantic_settings",
    "pyspark",
    "sqlite3",
}
HEAVY.add("starlette")


def own(names):
    return {name for name in names if name.partition(".")[0] == "tiered_index"}


@pytest.mark.parametrize("arguments", [("--version",), ("--help",), ("spark", "--help")])
def test_version_and_the_list_of_commands_load_no_command(arguments):
    names, _ = loaded(*arguments)
    assert own(names) == ALWAYS
    assert not names & (HEAVY | {"numpy", *(("rich",) if arguments == ("--version",) else ())})


def test_the_help_of_a_command_loads_neither_the_engine_nor_its_libraries():
    """The help of `ingest` took 580 ms of processor time, two thirds of it for modules that help does not need."""
    help_modules = {f"tiered_index.{name}" for name in HELP}
    lines = ["import json, sys", "from tiered_index.cli.main import run"]
    lines += ["def help_of(*words):", "    try:", "        run([*words, '--help'])", "    except SystemExit as ended:"]
    lines += ["        assert not ended.code"]
    lines += [f"help_of{words!r}" for words, _ in all_commands()]
    lines += ["print(json.dumps(sorted(sys.modules)), file=sys.stderr)"]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    names = set(json.loads(done.stderr))
    assert done.stdout.count("Usage:") == len(list(all_commands())) > 15
    ours = {name for name in own(names) if name not in COMMANDS}
    assert ours == (ALWAYS | help_modules) - {"tiered_index.cli.__main__"}
    # entry points, which are read only if another package has connectors
    assert not names & (HEAVY | {"msgspec", "numpy", "obstore", "pydantic", "importlib.metadata"})


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_a_query_of_a_root_loads_only_modules_that_read(root, more):
    names, _ = loaded("query", "t", "k", "--root", root, *more)
    assert not names & HEAVY
    assert ("rich" in names) == (not more)
    assert ALWAYS | {"tiered_index.cli.look_up.query", "tiered_index.service.reader"} <= own(names)
    writes = (
        "service.jobs.erase",
        "service.jobs.merge",
        "service.jobs.verify",
        "service.index",
        "service.life",
        "service.opening",
        "service.write",
    )
    others = ("connectors.files", "cli.spark", "connectors.rocketmq.classic", "connectors.rocketmq.follow", "spark")
    unused = (*writes, *others, "storage.s3.boto", "storage.sqlite", "testing")
    assert not [name for name in own(names) if name.removeprefix("tiered_index.").startswith(unused)]
    if more:
        # a merge in this process needs nothing of Spark
        names, _ = loaded("merge", "--root", root)
        assert not [
            name for name in names if name.startswith(("pyspark", "tiered_index.spark", "tiered_index.cli.spark"))
        ]


def test_a_batch_of_a_reader_loads_no_arrow(root):
    """Arrow takes 25 MiB."""
    lines = ["import sys", "from tiered_index import IndexReader"]
    lines += [f"with IndexReader.open(root={str(root)!r}) as reader:"]
    lines += ["    answers = reader.query_many([('t', 'k'), ('t', 'none'), ('other', 'k')])"]
    lines += ["print(answers.counts.tolist(), len(answers.rows), sorted({'pyarrow', 'pandas'} & set(sys.modules)))"]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    assert done.stdout == "[1, 0, 0] 1 []\n"


def others_than_specs(names):
    """Return the modules of connectors that read a broker, without their specs."""
    below = ("tiered_index.connectors.kafka.", "tiered_index.connectors.rocketmq.")
    return sorted(name for name in names if name.startswith(below) and not name.endswith(".spec"))


@pytest.mark.parametrize("with_topic", [False, True])
def test_an_ingest_of_a_file_loads_no_connector_of_a_broker(tmp_path, with_topic):
    """It loaded 26 modules of Kafka and RocketMQ."""
    messages = tmp_path / "messages.ndjson"
    message = {"topic": "t", "queue_id": 0, "key": "k", "offset": 1, "size": 1, "timestamp_ms": 1_700_000_000_000}
    messages.write_text(json.dumps(message) + "\n")
    rows = ("--topic", "t", "--key", "key", "--time", "timestamp_ms") if with_topic else ()
    places = ("--root", tmp_path / "root", "--storage", f"file://{tmp_path}/store", "--quiet")
    names, _ = loaded("ingest", messages, *places, *rows)
    assert f"tiered_index.connectors.files.{'linked' if with_topic else 'message_files'}" in names
    assert others_than_specs(names) == []


def test_messages_of_files_need_no_connector_of_a_broker(tmp_path):
    rows = tmp_path / "rows.ndjson"
    rows.write_text('{"id": "k", "timestamp": 1700000000000}\n')
    storage = ("--storage", f"file://{tmp_path}/store")
    loaded("ingest", rows, "--root", tmp_path / "root", *storage, "--quiet", "--topic", "t", "--key", "id", "--wait")
    for words in (("query", "t", "k", "--messages"), ("message", "k", "--topic", "t")):
        names, out = loaded(*words, *storage, "--json")
        assert json.loads(out)["messages"][0]["message"]["body"]
        assert others_than_specs(names) == []


def test_an_erasure_of_rows_needs_no_connector_of_a_broker(tmp_path):
    rows = tmp_path / "rows.ndjson"
    rows.write_text('{"id": "k", "timestamp": 1700000000000}\n')
    storage = ("--storage", f"file://{tmp_path}/store")
    of_rows = ("--topic", "t", "--key", "id", "--archive", "--wait", "--quiet")
    loaded("ingest", rows, "--root", tmp_path / "root", *storage, *of_rows)
    names, out = loaded("erase", "--topic", "t", "--key", "k", *storage, "--yes", "--now", "--json", "--quiet")
    assert json.loads(out)
    assert "tiered_index.connectors.files.connector" in names
    assert others_than_specs(names) == []


def test_a_service_of_files_loads_no_connector_of_a_broker(tmp_path):
    rows = tmp_path / "rows.ndjson"
    rows.write_text('{"id": "k", "timestamp": 1700000000000}\n')
    storage = f"file://{tmp_path}/store"
    of_rows = ("--topic", "t", "--key", "id", "--wait", "--quiet")
    loaded("ingest", rows, "--root", tmp_path / "root", "--storage", storage, *of_rows)
    # the program that serves stops itself after it was asked
    script = (
        "import json, os, signal, sys, threading, urllib.request\n"
        "from tiered_index.cli.__main__ import run\n"
        "from tiered_index.cli.operate import serving\n"
        "tell_ready = serving.Serving._tell_ready\n"
        "def ask(self, urls):\n"
        "    tell_ready(self, urls)\n"
        "    asked.append(threading.Thread(target=answers, args=urls[:1]))\n"
        "    asked[0].start()\n"
        "def answers(url):\n"
        "    try:\n"
        "        key, found = 'topic=t&key=k', 'body=json&contains=K'\n"
        "        for path in (f'query?{key}', f'messages?{key}&{found}', 'messages/k?topic=t', 'topics'):\n"
        "            with urllib.request.urlopen(f'{url}/v1/{path}') as answer:\n"
        "                told.append(json.load(answer))\n"
        "    finally:\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "asked, told, serving.Serving._tell_ready = [], [], ask\n"
        "try:\n"
        "    run()\n"
        "finally:\n"
        "    print(json.dumps([told, sorted(sys.modules)]))\n"
    )
    words = ("serve", "--port", "0", "--storage", storage, "--quiet")
    done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, check=False)
    told, names = json.loads(done.stdout)
    assert [len(answer.get("messages", answer.get("items", answer.get("topics")))) for answer in told] == [1, 1, 1, 1]
    assert told[1]["messages"][0]["message"]["body"] == {"id": "k", "timestamp": 1_700_000_000_000}
    assert others_than_specs(names) == []


def test_a_reader_of_a_storage_loads_only_modules_of_its_lookup(root):
    script = (
        "import json, sys\n"
        "from tiered_index import IndexReader\n"
        f"with IndexReader.open('file://{root.parent}/store') as reader:\n"
        "    reader.query('t', 'k')\n"
        "print(json.dumps(sorted(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    names = set(json.loads(done.stdout))
    assert not names & (HEAVY | {"pydantic", "rich", "typer"})
    assert not [name for name in own(names) if name.startswith(("tiered_index.cli", "tiered_index.service.write"))]


@pytest.mark.parametrize(
    "error",
    [
        PermissionError(13, "Permission denied"),
        ImportError("libarrow.so: failed to map segment from shared object"),
        MemoryError("memory is lacking"),
    ],
)
def test_a_command_that_can_not_be_loaded_is_one_line(error, monkeypatch, capsys):
    """Under `ulimit -v 200000` a command ended with a traceback of the dynamic linker, and code 1."""

    def unreadable(name):
        raise error

    monkeypatch.setattr("pkgutil.resolve_name", unreadable)
    with pytest.raises(SystemExit, match="3"):
        run(["query", "t", "k"])
    said = capsys.readouterr().err
    assert said.startswith(f"tiered-index: query can't be loaded: {error}: check") and said.count("\n") == 1
    with pytest.raises(ImportError, match="query can't be loaded"):
        run(["query", "t", "k", "--debug"])


def test_too_little_memory_is_an_error_of_the_set_up(capsys):
    def hungry(session: Session) -> int:
        raise MemoryError("unable to allocate 8.00 GiB")

    with pytest.raises(SystemExit, match="3"):
        run([], alone(command(hungry)))
    said = capsys.readouterr().err
    assert "too little memory" in said and said.endswith(": unable to allocate 8.00 GiB\n")


def test_a_folder_that_can_not_be_listed_is_an_error_of_the_set_up(tmp_path, monkeypatch, capsys):
    """As for another user, whom the folder's permissions exclude."""
    with IndexService.open(root=tmp_path / "root", storage=(tmp_path / "storage").as_uri()):
        pass

    def denied(self, folder):
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr(Disk, "names", denied)
    with pytest.raises(SystemExit, match="3"):
        run(["verify", "--root", str(tmp_path / "root")])
    assert re.search(r"^tiered-index: listing .*/root/\w+: Permission denied", capsys.readouterr().err)


@pytest.mark.parametrize("module", ["typer", "numpy"])
def test_an_interrupt_while_it_loads_is_one_line(module):
    script = (
        "import signal, sys\n"
        "class Hook:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == '{module}':\n"
        "            signal.raise_signal(signal.SIGINT)\n"
        "sys.meta_path.insert(0, Hook())\n"
        "from tiered_index.cli.__main__ import run\n"
        "run()\n"
    )
    command = [sys.executable, "-c", script, "query", "t", "k"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    path = tmp_path_factory.mktemp("streams") / "root"
    with IndexService.open(root=path, storage=f"file://{path.parent}/store", slots=16, items=60) as index:
        index.put("t", 0, "k", 1, 1, 1_700_000_000_000)
    return path


@pytest.mark.parametrize(
    ("redirect", "arguments", "code", "word"),
    [
        (">&-", "query t k", 0, ""),
        ("2>&-", "query t k", 0, None),
        ("2>/dev/full", "query t", 2, None),
        (">/dev/full", "query t k", 7, "tiered-index: stdout can't be written: No space left on device\n"),
        pytest.param(">/dev/full", "query t k --json", 7, '"exit_code": 7', marks=pytest.mark.long),
        (">/dev/full", "--version", 7, "tiered-index: stdout can't be written: No space left on device\n"),
    ],
)
def test_streams_that_are_closed_or_full(root, redirect, arguments, code, word):
    place = f"--root {root}" if "query" in arguments else ""
    command = f"{sys.executable} -m tiered_index.cli {arguments} {place} {redirect}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert "Traceback" not in done.stderr
    assert word is None or (word in done.stderr if word else not done.stderr)
    assert ("complete" in done.stdout) == (redirect.startswith("2") and code == 0)
