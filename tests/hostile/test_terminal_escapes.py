"""Other people's text in the output of every command: none of it reaches a terminal as a control sequence."""

import ast
import io
import itertools
import json
import logging
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

import tiered_index.cli
from tests.integration.cli.command_lines import run_here
from tests.rocketmq.messages import NOW_MS, joined, message, write_log
from tests.storage.scripted_server import error, scripted_server
from tiered_index import IndexService
from tiered_index.cli import session
from tiered_index.cli.output import Output, PrintableFormatter, ProgressDisplay, printable
from tiered_index.format.names import lease_name
from tiered_index.storage.opening import open_storage

# colour, title, link, clipboard; the same as C1; direction marks, Unicode line ends, delete, bells, returns
CONTROLS = "\x1b[31m\x1b]0;t\x07\x1b]8;;http://x\x1b\\\x1b]52;c;aGk=\x07\x9b2J\x9d0;t\x9c\x90\u202e\u2066\u200f\u2028\u2029\x7f\b\r\v\f\x85"
MARKUP = "[red]r[/red][link=http://x]l[/link]"
TEXT = f"a{CONTROLS}{MARKUP}z"
NAME = f"n{CONTROLS.replace('/', '')}[red]r"  # the name of a file
SAFE = r"\x1b[31m"


def is_safe(text: str, allowed: str = "\n") -> bool:
    return all(c.isprintable() or c in allowed for c in text)


def refused_or_done(*arguments: object, **more: str) -> str:
    """Return a command's whole output, as text and as JSON. Both must be safe, and the JSON must be ASCII."""
    shown = ""
    for form in ((), ("--json",)):
        done = run_here(*arguments, *form, "--debug", environment=more)
        assert done.code in (0, 1, 2, 3, 4, 5, 6), done.err
        assert is_safe(done.out, "\n\t"), repr(done.out)
        assert is_safe(done.err, "\n\t"), repr(done.err)
        if form:
            assert done.out.isascii()
            assert "\x7f" not in done.out
        shown += done.out + done.err
    return shown


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a hostile name. Its index has hostile topics and keys: one file uploaded, one unsealed."""
    folder = tmp_path_factory.mktemp("hostile") / NAME
    folder.mkdir()
    settings = {"slots": 7, "items": 20, "background": False, "offset_space": "commitlog"}
    with IndexService.open(root=folder / "root", storage=(folder / "storage").as_uri(), **settings) as index:
        index.put(TEXT, 0, [TEXT], 0, 10, NOW_MS, source=TEXT, source_position=1)
        index.seal()
        index.run_lifecycle()
        index.put(TEXT, 0, [TEXT, "plain"], 10, 10, NOW_MS, source=TEXT, source_position=2)
        index.flush()
    return folder


def test_every_command_on_an_index(folder: Path) -> None:
    place = ("--root", folder / "root")
    uploaded, unsealed = (next((folder / "root" / state).glob("*.index")) for state in ("uploaded", "unsealed"))
    assert SAFE in refused_or_done("files", *place)
    assert "2 found" in refused_or_done("query", TEXT, TEXT, *place, "--explain")
    for file in (uploaded, unsealed):
        assert SAFE in refused_or_done("files", file, *place)
        refused_or_done("files", file, "--entries", *place)
    for line in (("verify",), ("recover",), ("orphans",), ("merge",), ("query", TEXT, TEXT, "--cursor", TEXT)):
        refused_or_done(*line, *place)
    for form in ((), ("--entries",)):
        assert SAFE in refused_or_done("files", folder / TEXT, *form, *place)


def test_the_holder_of_the_lock_or_the_lease_is_printed_safely(tmp_path: Path) -> None:
    uri = (tmp_path / "storage").as_uri()
    settings = {"storage": uri, "slots": 7, "items": 20, "background": False}
    with IndexService.open(root=tmp_path / "root", **settings):
        (tmp_path / "root" / "lock").write_text(json.dumps({"pid": 1, "host": TEXT}))
        assert SAFE in refused_or_done("recover", "--root", tmp_path / "root")
        with open_storage(uri) as storage:
            lease = {"host": TEXT, "pid": 1, "released": False, "place": "", "ttl_ms": 60_000}
            storage.put(lease_name(1, 99), json.dumps(lease).encode())
        assert SAFE in refused_or_done("recover", "--root", tmp_path / "other", "--storage", uri)


def test_the_text_of_a_server_is_printed_safely() -> None:
    """XML can't have ESC, but it can have C1 controls and direction marks."""
    possible = "\x9b\x9d\x9c\x90\u202e\u2066\u2028\x7f\x85"
    said = "".join(c for c in TEXT if (c.isprintable() or c in possible) and c != "<")
    with scripted_server() as server:
        server.answers(error(403, said, said))
        uri = f"s3://bucket?endpoint_url={server.endpoint_url}&region=us-east-1"
        shown = refused_or_done("files", "--storage", uri, AWS_ACCESS_KEY_ID="a", AWS_SECRET_ACCESS_KEY="b")
        assert r"\x9b2J" in shown


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A RocketMQ store with one message of hostile topic, properties and body."""
    properties = f"KEYS\x01k{CONTROLS}\x02TAGS\x01{TEXT}\x02own\x01{TEXT}\n  message id  forged\x02".encode()
    body = json.dumps({TEXT: [TEXT, "\udc80"]}, ensure_ascii=False).encode("utf-8", "surrogatepass")
    bodies = [body, f"{TEXT}\n2023-11-14 forged\t{TEXT}".encode(), b"\x1b[31m\xff"]
    messages, offset = [], 0
    for number, content in enumerate(bodies):
        fields = {"properties": properties, "body": content, "store_ms": NOW_MS + 1000 * number}
        messages.append(message(offset, topic=f"t{CONTROLS}", **fields))
        offset += messages[-1].size
    (tmp_path / "store").mkdir()
    write_log(tmp_path / "store" / "commitlog", 1 << 16, {0: joined(messages)})
    return tmp_path / "store"


def test_messages_of_a_store(store: Path, tmp_path: Path) -> None:
    place = ("--root", tmp_path / "root", "--storage", f"file://{tmp_path}/storage")
    refused_or_done("ingest", store, *place, "--slots", 7, "--items", 20, "--store-name", TEXT)
    topic, key = f"t{CONTROLS}", f"k{CONTROLS}"
    shown = ""
    for body in ("text", "json", "hex"):
        shown += refused_or_done("query", topic, key, *place, "--messages", "--store", store, "--body", body)
    assert SAFE in shown
    assert "3 found" in shown
    assert MARKUP in shown
    forged = [line for line in shown.splitlines() if re.match(r" {0,3}(2023-11-14 forged|message id  forged)", line)]
    assert not forged, "a property or body looks like a line of ours"


def test_the_command_line_itself() -> None:
    wrong = ((TEXT,), ("spark", TEXT), ("files", f"--{TEXT}"), ("files", "--storage", TEXT))
    for line in (*wrong, ("query", "t", "k", TEXT), ("query", "t", "k", "--max", TEXT)):
        assert is_safe(run_here(*line).err), line


def test_logs_are_safe_with_their_tracebacks(capsys: pytest.CaptureFixture[str]) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(PrintableFormatter("%(levelname)s %(name)s: %(message)s"))
    logger = logging.Logger("x")
    logger.addHandler(handler)
    try:
        raise ValueError(TEXT)
    except ValueError:
        logger.exception("found %s\nWARNING forged", TEXT)
    shown = capsys.readouterr().err
    assert is_safe(shown), repr(shown)
    assert SAFE in shown
    assert "Traceback (most recent call last):\n" in shown
    assert "\nWARNING" not in shown


def test_warnings_of_other_packages_are_safe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If no handler takes a record, `logging` itself writes it to stderr."""
    assert logging.lastResort is not None
    monkeypatch.setattr(logging.lastResort, "formatter", None)
    logger = logging.getLogger("tiered_index")
    monkeypatch.setattr(logger, "handlers", list(logger.handlers))
    monkeypatch.setattr(logger, "propagate", logger.propagate)
    monkeypatch.setattr(logger, "level", logger.level)
    session._set_up_logging(verbose=False, debug=False)
    logging.lastResort.handle(logging.LogRecord("urllib3", logging.WARNING, "", 0, "header %s", (TEXT,), None))
    shown = capsys.readouterr().err
    assert is_safe(shown)
    assert SAFE in shown


def test_progress_on_a_terminal_and_off_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        encoding = "utf-8"

    # each look at the clock is five seconds later
    monkeypatch.setattr("tiered_index.cli.output.time", SimpleNamespace(monotonic=itertools.count(0, 5).__next__))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "400")
    for terminal in (True, False):
        stream = Terminal()
        stream.isatty = lambda is_terminal=terminal: is_terminal
        monkeypatch.setattr("sys.stderr", stream)
        with ProgressDisplay(TEXT, 10, quiet=False) as progress:
            progress.update(5, TEXT)
        # the text without the bar's own colours and movements
        rest = re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", stream.getvalue())
        assert is_safe(rest, "\n\r"), repr(rest)
        assert SAFE in stream.getvalue()
        assert MARKUP in stream.getvalue()
        assert "\x9b" not in stream.getvalue()


def test_each_way_of_writing_is_safe(capsys: pytest.CaptureFixture[str]) -> None:
    assert printable("заказ 注文 é €[x] \\") == "заказ 注文 é €[x] \\"
    assert printable("\x1b\x9b\u202e\n\t\ud800\0") == r"\x1b\x9b\u202e\n\t\ud800\x00"
    out = Output(as_json=False)
    ways = (out.line, out.lines, out.note, out.error_line, lambda text: out.error("Kind", text))
    for write in (*ways, lambda text: out.fields({"name": text}), lambda text: out.table(("column",), [(text,)])):
        write(TEXT)
        out.flush()
        shown = "".join(capsys.readouterr())
        assert is_safe(shown) and SAFE in shown, repr(shown)


_WRITES = {"print", "Console", "echo", "secho", "print_exception", "print_exc"}
# the last file prints one fixed word, before the others are loaded
_MAY_WRITE = {"output.py", "__main__.py"}


def test_one_place_writes_to_the_streams() -> None:
    """Then the commands that need Spark or a broker are as safe as those above."""
    commands = Path(tiered_index.cli.__file__).parent
    names = {path: path.relative_to(commands).as_posix() for path in commands.rglob("*.py")}
    writers = set()
    for path, shown in names.items():
        for node in ast.walk(ast.parse(path.read_text())):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if called.split(".")[-1] in _WRITES or called in ("sys.stdout.write", "sys.stderr.write"):
                writers.add(shown)
    assert writers == _MAY_WRITE
