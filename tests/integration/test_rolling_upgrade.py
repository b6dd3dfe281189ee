"""An earlier version, from the history, and the present one run on one index at the same time.

Each gives right answers, or names the newer feature that it does not know.
"""

import json
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tiered_index
from tests.integration.cli.command_lines import clean_environment
from tiered_index import IndexReader, IndexService

# the last one before packed files and horizons: format versions 1 and 2, log version 1
EARLIER = "453bda4220cb3257b7cf0e993d9f40b74c8fef75"
NOW_MS = time.time_ns() // 10**6
DAY_MS = 86_400_000

# commands on stdin, a line of JSON each, and one line of JSON per answer
PROGRAM = """
import json, sys
from tiered_index import IndexReader, IndexService
from tiered_index.errors import TieredIndexError

kept = {}

def do(name, **given):
    if name == "open":
        kept["index"] = IndexService.open(background=False, slots=16, items=100, local_keep_s=0, **given)
    elif name == "read":
        kept["index"] = IndexReader.open(refresh_interval_s=0, **given)
    elif name == "put":
        kept["index"].put(**given)
    elif name == "publish":
        kept["index"].seal()
        kept["index"].run_lifecycle()
    elif name == "flush":
        kept["index"].flush()
    elif name == "close":
        kept.pop("index").close()
    else:
        found = kept["index"].query("t", "k", max_count=1000)
        return [found.status, [item.offset for item in found]]

for line in sys.stdin:
    try:
        answer = do(**json.loads(line))
    except TieredIndexError as error:
        answer = [type(error).__name__, str(error)]
    print(json.dumps(answer), flush=True)
"""


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package of the earlier version."""
    folder, top = tmp_path_factory.mktemp("earlier"), Path(__file__).parents[2]
    packed = folder / "package.tar"

    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", str(top), *arguments], capture_output=True, text=True, check=True).stdout

    if not (top / ".git").exists() or git("rev-parse", "--is-shallow-repository").strip() == "true":
        pytest.skip("there is no history here")
    git("archive", "-o", str(packed), EARLIER, "tiered_index")
    with tarfile.open(packed) as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.fixture
def old(earlier: Path) -> Iterator[Callable[..., Any]]:
    """A process of the earlier version, which does one operation per call."""
    environment, pipe = clean_environment(PYTHONPATH=str(earlier)), subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=pipe, stdout=pipe, text=True, cwd=earlier, env=environment
    ) as process:
        assert process.stdin is not None and process.stdout is not None

        def ask(name: str, **arguments: Any) -> Any:
            process.stdin.write(json.dumps({"name": name, **arguments}) + "\n")  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]
            return json.loads(process.stdout.readline())  # type: ignore[union-attr]

        yield ask
        process.stdin.close()


def message(number: int) -> dict[str, Any]:
    """Return message `number`, of the day that many days ago."""
    return {"topic": "t", "queue_id": 0, "keys": "k", "offset": number, "size": 7, "timestamp_ms": _time(number)}


def _time(number: int) -> int:
    return NOW_MS - (100 - number) * DAY_MS


def expected(*numbers: int) -> list[Any]:
    return ["complete", sorted(numbers, reverse=True)]


def newer(answer: list[Any]) -> None:
    assert answer[0] == "UnsupportedVersion" and "log version 4 is newer than this reader" in answer[1]


def test_an_earlier_reader_names_the_newer_feature_once_a_present_writer_has_the_index(
    old: Callable[..., Any], tmp_path: Path
) -> None:
    uri, root = f"file://{tmp_path}/storage", str(tmp_path / "root")
    old("open", root=root, storage=uri)
    old("put", **message(1))
    old("publish")
    old("close")
    old("read", storage=uri)
    assert old("query") == expected(1)
    with IndexService.open(root=root, storage=uri, background=False, local_keep_s=0) as index:
        index.put(**message(2))
        index.seal()
        index.run_lifecycle()
    newer(old("query"))
    newer(old("read", storage=uri))
    with IndexReader.open(uri) as reader:
        assert [item.offset for item in reader.query("t", "k")] == [2, 1]


def test_a_present_reader_beside_an_earlier_writer(old: Callable[..., Any], tmp_path: Path) -> None:
    uri, root = f"file://{tmp_path}/storage", str(tmp_path / "root")

    def answer(reader: Any) -> list[Any]:
        answered = reader.query("t", "k", max_count=1000)
        return [answered.status, [item.offset for item in answered]]

    old("open", root=root, storage=uri)
    old("put", **message(1))
    old("publish")
    with IndexReader.open(uri, refresh_interval_s=0) as reader, IndexReader.open(uri, root=root) as beside:
        assert answer(reader) == answer(beside) == expected(1)
        for number in (2, 3):
            old("put", **message(number))
            old("publish")
            assert answer(reader) == expected(*range(1, number + 1))
        # merged and copied by the present version while the earlier writer still runs
        tiered_index.copy(uri, f"file://{tmp_path}/copy")
        old("put", **message(4))
        old("flush")
        assert answer(beside) == expected(1, 2, 3, 4)
    old("close")
    # the root changes hands, and not back
    with IndexService.open(root=root, storage=uri, background=False) as index:
        index.put(**message(5))
        index.seal()
        index.run_lifecycle()
        assert answer(index) == expected(1, 2, 3, 4, 5)
    newer(old("open", root=root, storage=uri))
    with IndexReader.open(uri) as reader, IndexReader.open(f"file://{tmp_path}/copy") as copied:
        assert answer(reader) == expected(1, 2, 3, 4, 5)
        assert answer(copied) == expected(1, 2, 3)
