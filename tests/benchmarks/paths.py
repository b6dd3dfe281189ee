"""`make bench SUITE=paths`: the way of one lookup through the package, by a profiler.

For each lookup it counts the files whose functions run, the calls of these functions, those of them that go upward, and
those that are given to another thread. A call is upward if its nearest caller in the package is in a lower room by the
layering contracts of `pyproject.toml`. No log is read meanwhile and nothing is flushed.
"""

import asyncio
import json
import sys
import threading
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import tiered_index
from tests.benchmarks.messages import START_MS, TOPIC
from tests.benchmarks.report import TOP, finish, options, require, scratch
from tests.server.conftest import service_of
from tiered_index import IndexReader, IndexService
from tiered_index.server.http.listening import HttpListener, own_names

_PACKAGE = str(Path(tiered_index.__file__).parent)
_FILES = 4


class Rooms:
    """The rooms of the package by the layering contracts of `pyproject.toml`: a number for each child of a room."""

    def __init__(self) -> None:
        contracts = tomllib.loads((TOP / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
        self._heights = {
            container: {
                name.strip(): -depth
                for depth, layer in enumerate(contract["layers"])
                for name in layer.strip("()").split("|")
            }
            for contract in contracts
            if contract["type"] == "layers"
            for container in contract["containers"]
        }

    def is_upward(self, caller: str, called: str) -> bool:
        """Return whether a module (with dots) is in a higher room than its caller."""
        here, there = caller.split("."), called.split(".")
        common = 0
        while common < min(len(here), len(there)) and here[common] == there[common]:
            common += 1
        heights = self._heights.get(".".join(here[:common]))
        if heights is None or common == min(len(here), len(there)):
            return False
        # a child that no contract names is the package's API, which no room calls
        return heights.get(there[common], 1) > heights.get(here[common], 1)


class Watched:
    """Counts the calls of functions of the package, in all threads, while it is entered."""

    def __init__(self, rooms: Rooms) -> None:
        self._rooms = rooms
        self.files = Counter[str]()
        self.upward = Counter[tuple[str, str]]()
        self.handed_over = 0
        self._modules: dict[CodeType, str | None] = {}

    def __enter__(self) -> "Watched":
        # for the threads that begin meanwhile: before a reader's first lookup it has none
        threading.setprofile(self._see)
        sys.setprofile(self._see)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    @property
    def calls(self) -> int:
        """The number of calls."""
        return self.files.total()

    def _module(self, code: CodeType) -> str | None:
        """Return the module of a function of the package; None: another one's, or the code of a whole module."""
        if code not in self._modules:
            path = code.co_filename
            known = path.startswith(_PACKAGE) and code.co_name != "<module>"
            parts = Path(path).relative_to(_PACKAGE).with_suffix("").parts if known else ()
            self._modules[code] = ".".join(["tiered_index", *parts]).removesuffix(".__init__") if known else None
        return self._modules[code]

    def _see(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or (called := self._module(frame.f_code)) is None:
            return
        self.files[called] += 1
        # the pools' one way to another thread
        self.handed_over += called == "tiered_index.base.threads" and frame.f_code.co_name == "submit"
        outer = frame.f_back
        while outer is not None and self._module(outer.f_code) is None:
            outer = outer.f_back
        if outer is None:
            return
        caller = self._module(outer.f_code)
        assert caller is not None
        if self._rooms.is_upward(caller, called):
            self.upward[f"{caller}.{outer.f_code.co_name}", f"{called}.{frame.f_code.co_name}"] += 1


@contextmanager
def _lookups(folder: Path, storage: str) -> Iterator[dict[str, tuple[Callable[[], Any], int]]]:
    """Yield lookups by name, each with its number of entries, in the order in which they are asked."""
    with ExitStack() as stack:
        writer = stack.enter_context(
            IndexService.open(root=folder / "root", storage=storage, slots=1_000, items=10_000, background=False)
        )
        for number in range(_FILES):
            # the key "each" is in every file, and "one" only in the newest
            for at in range(500):
                writer.put(TOPIC, 0, f"k{number} {at}", number * 1_000 + at, 1, START_MS + number * 60_000)
            writer.put(TOPIC, 0, "each", number * 1_000 + 998, 1, START_MS + number * 60_000)
            writer.put(TOPIC, 0, "one" if number == _FILES - 1 else "old", 9_999, 1, START_MS + number * 60_000)
            writer.seal()
            writer.run_lifecycle()

        def reader() -> IndexReader:
            return stack.enter_context(IndexReader.open(storage, refresh_interval_s=1e9, environment=False))

        begin = START_MS + (_FILES - 1) * 60_000
        for_one, for_four = reader(), reader()
        writer.put(TOPIC, 0, "buffered", 5_000_000, 1, begin)
        yield {
            "first cold lookup of one file": (lambda: for_one.query(TOPIC, "one", begin), 1),
            "second lookup, another key of the file": (lambda: for_one.query(TOPIC, f"k{_FILES - 1} 7", begin), 1),
            "the same again: a warm lookup": (lambda: for_one.query(TOPIC, f"k{_FILES - 1} 7", begin), 1),
            "first cold lookup of four files": (lambda: for_four.query(TOPIC, "each"), _FILES),
            "second lookup of four files": (lambda: for_four.query(TOPIC, "k0 7"), 1),
            "100 keys at once, warm": (
                lambda: for_four.query_many([(TOPIC, f"k{at % _FILES} {at}") for at in range(100)]),
                100,
            ),
            "writer, a local file": (lambda: writer.query(TOPIC, "one"), 1),
            "writer, a buffered entry": (lambda: writer.query(TOPIC, "buffered"), 1),
            "HTTP, warm": (stack.enter_context(_asking_over_http(reader())), 1),
        }


@contextmanager
def _asking_over_http(reader: IndexReader) -> Iterator[Callable[[], list[Any]]]:
    """Yield a function that looks up a key over a connection to a service in this thread. It has asked before."""

    async def begin() -> tuple[HttpListener, asyncio.StreamReader, asyncio.StreamWriter]:
        listener = await HttpListener(service.app, "127.0.0.1", 0).__aenter__()
        return listener, *await asyncio.open_connection("127.0.0.1", listener.port)

    async def answer() -> list[Any]:
        writing.write(f"GET /v1/query?topic={TOPIC}&key=one HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n".encode())
        head = await reading.readuntil(b"\r\n\r\n")
        size = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
        items: list[Any] = json.loads(await reading.readexactly(size))["items"]
        return items

    with asyncio.Runner() as runner, service_of(reader, hosts=own_names("127.0.0.1")) as service:
        listener, reading, writing = runner.run(begin())
        # the first one reads the file, and the filters of the others follow it
        for _ in range(3):
            require(len(runner.run(answer())), 1, "entries over HTTP")
        yield lambda: runner.run(answer())
        writing.close()
        runner.run(listener.__aexit__())


def main(suite: str, arguments: list[str]) -> None:
    """Count, and print the tables."""
    parser = options(suite, __doc__)
    parser.add_argument("--calls", action="store_true", help="print the files and the upward calls of each lookup")
    flags = parser.parse_args(arguments)
    document: dict[str, list[Any]] = {}
    columns = ["", "files", "calls", "upward", "given to threads"]
    with scratch(flags.root_dir) as folder:
        storages = {"in a folder": f"file://{folder / 'storage'}", "in SQLite": f"sqlite://{folder / 'objects.db'}"}
        rooms = Rooms()
        for name, storage in storages.items():
            rows: list[list[Any]] = [columns]
            with _lookups(folder / name, storage) as lookups:
                for title, (ask, entries) in lookups.items():
                    with Watched(rooms) as watched:
                        answer = ask()
                    answered = len(answer) if not isinstance(answer, tiered_index.QueryResult) else len(answer.items)
                    require(answered, entries, f"entries of {title}")
                    rows.append([title, len(watched.files), watched.calls, watched.upward.total(), watched.handed_over])
                    if flags.calls:
                        print(f"\n{title}, {name}", *sorted(watched.files), sep="\n  ")
                        for (caller, called), count in watched.upward.most_common():
                            print(f"  {count:4} {caller} -> {called}")
            document[f"lookups, objects {name}"] = rows
    finish(flags, {"tables": document})
