"""`python -m tests.demo`: a live store of two million messages through all states, two crashes, every answer checked.

Each stage is one method. A broker's process writes the stream into a store. The ingesting process follows it and is
killed twice. The newest part passes through the states in this process. One thread runs beside the engine's own.
"""

import contextlib
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from typer import Option

from tests.demo.processes import Broker, Follower, ServedDemo, placed
from tests.demo.workload import TOPICS, Census, LookupChecks, ReferenceAnswers, Workload, lookups_of, take_census
from tests.support.processes import own_environment
from tests.support.s3_server import CREDENTIALS, s3_server
from tests.support.storage_faults import FaultStorage
from tiered_index.cli.declaring import command
from tiered_index.cli.main import alone, run
from tiered_index.cli.output import Output, human_bytes, human_count, human_seconds, states
from tiered_index.cli.session import Session
from tiered_index.config import IndexConfig
from tiered_index.connectors.follow import Follower as SourceFollower
from tiered_index.connectors.rocketmq.follow.dispatcher import Dispatcher
from tiered_index.connectors.rocketmq.log.store import StoreDirectory
from tiered_index.errors import InvalidArgument, StorageUnavailable
from tiered_index.format.layout import NATIVE, Layout
from tiered_index.format.names import DATA_PREFIX
from tiered_index.service.index import IndexService
from tiered_index.service.reader import IndexReader
from tiered_index.storage.opening import open_storage
from tiered_index.types import Lookup

_TAIL_SHARE = 0.05
_FILES = 9
_MAX_ITEMS = 1 << 18
_FIRST_KILL_FILES = _FILES // 2
_PATIENCE_S = 60.0
_PAGE, _COLD_PAGE = 1000, 5000
_SEED = 1
# lookups in each local state, and in the storage alone
_LOOKUPS, _COLD_LOOKUPS = 1_000, 200
_WRONG = 1
LOOKUP_COLUMNS = ("lookups", "answers", "wrong", "p50 ms", "p99 ms", "requests", "bytes")

Say = Callable[[str], None]


def geometry_of(entries: int) -> Layout:
    """Return a geometry with about nine files."""
    items = min(_MAX_ITEMS, max(2, entries // _FILES))
    return Layout(NATIVE, NATIVE.schema, max(1, items // 4), items)


@dataclass
class Stages:
    """One run of the demo."""

    config: IndexConfig
    folder: Path
    messages: int
    say: Say
    closing: contextlib.ExitStack
    figures: dict[str, Any] = field(default_factory=dict)

    def generate(self) -> None:
        """Make the stream and the expected answers, and start the broker's process."""
        self.store = self.folder / "store"
        self.tail_start = int(self.messages * (1 - _TAIL_SHARE))
        self.broker = self.closing.enter_context(Broker(self.messages, _SEED, self.tail_start, self.store))
        self.workload = workload = placed(Workload.generate(self.messages, seed=_SEED))
        self.checks = LookupChecks(ReferenceAnswers(workload))
        days = (int(workload.timestamp_ms.max()) - int(workload.timestamp_ms.min())) / 86_400_000
        late = int(workload.late.sum())
        self.figures |= {"messages": len(workload), "entries": workload.entries, "days": round(days, 1)}
        self.say(f"{len(workload):,} messages ({late:,} of them late), {workload.entries:,} entries, {days:.1f} days")

    def follow_and_die(self) -> None:
        """Run the ingesting process three times: killed during writes, killed in an upload, and to the log's end."""
        geometry = geometry_of(self.workload.entries)
        follower = Follower(self.store, Path(str(self.config.root)), str(self.config.storage), geometry)
        store = StoreDirectory.open(self.store)
        end = int(self.workload.offset[self.tail_start - 1] + self.workload.size[self.tail_start - 1])
        kills: list[dict[str, Any]] = []

        def over() -> bool:
            """Return whether all messages are written, indexed and uploaded."""
            written = store.log_end()
            taken = written is not None and written.offset >= end and follower.files_begun() >= _FILES - 1
            return taken and follower.is_idle()

        moments: list[tuple[str, Callable[[], bool], bool]] = [
            ("while writing", lambda: follower.files_begun() >= _FIRST_KILL_FILES, False),
            ("in the middle of an upload", follower.is_uploading, True),
        ]
        for text, moment, hold_uploads in moments:
            if follower.run_until(moment, over, hold_uploads=hold_uploads):
                written = store.log_end()
                recovered = follower.recover()
                position, notes = max(recovered["sources"].values(), default=0), recovered["notes"]
                log_end = written.offset if written is not None else 0
                kills.append({"moment": text, "resumed_from": position, "log_end": log_end})
                outcome = f"recovered: {notes[0]}" if notes else "recovered, no half-made files"
                more = f" (and {len(notes) - 1} more)" if len(notes) > 1 else ""
                self.say(f"SIGKILL {text}; {outcome}{more}; continues at byte {position:,} of the commit log")
            else:
                self.say(f"the process ended before it could be killed {text}")
        self.broker.wait_written()
        summary = follower.finish(end)
        self.figures["kills"] = kills
        self.say(
            f"the same command again read bytes {summary['resumed_from']:,} to {summary['position']:,}; files: "
            f"{summary['files']}"
        )

    def walk_the_states(self) -> None:
        """Take the newest messages through every state in this process, and look keys up in each."""
        self.broker.write_tail()
        lookups = lookups_of(self.workload, self.tail_start, min(_LOOKUPS, self.messages // 100), _SEED)
        outage = FaultStorage(open_storage(str(self.config.storage), options=self.config.s3))
        with IndexService.open(self.config, storage_backend=outage) as index:
            started_s = time.monotonic()
            entries = self._dispatch_tail(index)
            put_s = time.monotonic() - started_s
            self._check("write buffer", index, lookups)
            started_s = time.monotonic()
            index.flush()
            self.figures["ingest_entries_per_s"] = round(entries / (put_s + time.monotonic() - started_s))
            self._check("unsealed file", index, lookups)
            outage.fail("put", times=None, error=_simulated, name_prefix=DATA_PREFIX)
            index.seal()
            started_s = time.monotonic()
            try:
                index.run_lifecycle()
            except StorageUnavailable as error:
                self.say(f"compacted, and kept locally while the storage is unreachable ({error})")
            self.figures["compact_entries_per_s"] = round(entries / (time.monotonic() - started_s))
            self._check("compacted file", index, lookups)
            outage.clear()
            index.run_lifecycle()
            self._check("uploaded, local copy", index, lookups, page=_PAGE)
            self.figures["upload_bytes"] = sum(o.size_bytes for o in index.log_state.objects.values())

    def read_without_state(self) -> Census:
        """Look keys up by a reader that has only the storage's URI, then count every entry in the storage."""
        lookups = lookups_of(self.workload, self.tail_start, min(_COLD_LOOKUPS, self.messages // 500), _SEED + 1)
        with IndexReader.open(config=self.config.changed(root=None)) as reader:
            self._check("storage only, first", reader, lookups[:1])
            self._check("storage only", reader, lookups[1:], page=_COLD_PAGE)
            census = take_census(reader, self.workload)
        wrong = [text for measured in self.checks.done for text in measured.wrong]
        self.figures |= {f"entries_{name}": count for name, count in asdict(census).items()}
        self.figures |= {"lookups": [measured.to_dict() for measured in self.checks.done]}
        self.figures |= {"wrong_answers": len(wrong), "wrong": wrong[:5]}
        return census

    def _dispatch_tail(self, index: IndexService) -> int:
        source = Dispatcher(index, StoreDirectory.open(self.store), follow=False)
        follower = SourceFollower(index, source, follow=False, patience_s=_PATIENCE_S)
        follower.run()
        self.figures |= {"log_bytes": source.position, "log_segments": len(list(source.store.commitlog.iterdir()))}
        return follower.entries

    def _check(self, place: str, index: IndexService | IndexReader, lookups: list[Lookup], page: int = 0) -> None:
        """Run the lookups. With a `page`, read the answers of the most frequent key page by page."""
        files = dict(Counter(handle.place for handle in index.files()))
        hottest = Lookup(topic=TOPICS[0], key=self.workload.keys[0], max_count=page) if page else None
        measured = self.checks.check(place, files, index.query, lookups, paged=hottest)
        wrong = f", {len(measured.wrong)} WRONG" if measured.wrong else ""
        self.say(f"{place}: {len(measured.latencies_ms):,} lookups, {measured.answers:,} answers{wrong}")


def _simulated(text: str) -> StorageUnavailable:
    return StorageUnavailable(f"simulated outage: {text}")


@contextlib.contextmanager
def demo_place() -> Iterator[tuple[Path, str]]:
    """Yield an empty folder, and the URI of an index on an S3 server that runs in the block, with its environment."""
    with (
        tempfile.TemporaryDirectory(prefix="tiered-index-demo-", ignore_cleanup_errors=True) as name,
        s3_server() as server,
        own_environment(CREDENTIALS),
    ):
        bucket = server.new_bucket("demo")
        yield Path(name), f"s3://{bucket}/index?endpoint_url={server.endpoint_url}&addressing_style=path"


@contextlib.contextmanager
def told_times(out: Output) -> Iterator[Say]:
    """Yield a function that prints a line with the seconds since the block began."""
    started_s = time.monotonic()
    yield lambda text: out.note(f"[{time.monotonic() - started_s:5.1f} s] {text}")


def refuse_places(session: Session) -> None:
    """Raise `InvalidArgument` for a place of the user's."""
    if session.root is not None or session.storage is not None or session.config_file is not None:
        raise InvalidArgument("the demo makes its own index: leave out --root, --storage and --config")


@command
def demo(
    session: Session,
    messages: int = Option(2_000_000, min=10_000, help="Messages of the stream."),
    serve: bool = Option(False, "--serve", help="Serve the store while it is written, until Ctrl-C."),
    port: int = Option(8080, min=0, max=65535, help="With --serve: port of HTTP and the console; 0: any free one."),
    rocketmq_port: int = Option(9876, min=0, max=65535, help="With --serve: port for RocketMQ's tools."),
) -> int:
    """Follow a RocketMQ store through every state into an object store, with two kills; check every answer.

    The storage is an embedded S3 server. Exit code 1 means that an entry is lost or an answer is wrong.

    With --serve nothing is killed. The service follows the store, and answers over HTTP and RocketMQ's protocol, on
    this host only. Its storage is a folder.

    [bold]Examples[/bold]

      python -m tests.demo

      python -m tests.demo --messages 200000 --json

      python -m tests.demo --serve
    """
    refuse_places(session)
    if serve:
        with tempfile.TemporaryDirectory(prefix="tiered-index-demo-", ignore_cleanup_errors=True) as name:
            ServedDemo(Path(name), messages, _SEED, geometry_of(messages), port, rocketmq_port).run(session.out)
        return 0
    started_s = time.monotonic()
    with demo_place() as (folder, uri), told_times(session.out) as say, contextlib.ExitStack() as closing:
        say("storage: an embedded S3 server (moto; its latencies are not those of S3)")
        config = IndexConfig.load(root=folder / "root", storage=uri, background=False)
        stages = Stages(config, folder, messages, say, closing)
        stages.generate()
        stages.follow_and_die()
        stages.walk_the_states()
        census = stages.read_without_state()
    wrong = bool(census.lost or census.unexpected or stages.figures["wrong_answers"])
    figures = {"status": "wrong" if wrong else "ok", **stages.figures}
    figures["elapsed_s"] = round(time.monotonic() - started_s, 1)
    session.out.answer(figures)
    _write(session.out, figures)
    return _WRONG if wrong else 0


def lookup_cells(measured: dict[str, Any]) -> tuple[object, ...]:
    return (
        *(human_count(measured["lookups"]), human_count(measured["answers"]), measured["wrong"]),
        *(f"{measured['p50_ms']:.2f}", f"{measured['p99_ms']:.2f}"),
        *(human_count(measured["requests_per_lookup"]), human_bytes(measured["bytes_per_lookup"])),
    )


def _write(out: Output, figures: dict[str, Any]) -> None:
    rows = [(f["place"], states(f["files"]), *lookup_cells(f)) for f in figures["lookups"]]
    columns = ("place", "files by state", *LOOKUP_COLUMNS)
    out.table(columns, rows, right=("lookups", "answers", "wrong", "requests", "bytes"))
    kills = figures["kills"]
    fields: dict[str, object] = {
        "messages": f"{human_count(figures['messages'])} in {len(TOPICS)} topics over {figures['days']} days",
        "entries": figures["entries"],
        "commit log": f"{human_bytes(figures['log_bytes'])} in {figures['log_segments']} segments",
        "dispatch and flush": f"{human_count(figures['ingest_entries_per_s'])} entries/s",
        "compaction rate": f"{human_count(figures['compact_entries_per_s'])} entries/s",
        "uploaded": human_bytes(figures["upload_bytes"]),
        "kills survived": f"{len(kills)} ({', '.join(kill['moment'] for kill in kills) or 'none'})",
        "entries put twice": figures["entries_repeated"],
        "entries lost": figures["entries_lost"],
        "entries unexpected": figures["entries_unexpected"] or None,
        "wrong answers": figures["wrong_answers"],
        "time": human_seconds(figures["elapsed_s"]),
    }
    out.fields(fields)
    write_end(out, figures)


def write_end(out: Output, figures: dict[str, Any]) -> None:
    """Print wrong answers, and whether all is right."""
    for text in figures["wrong"][:5]:
        out.line(f"WRONG {text}")
    out.line("all right" if figures["status"] == "ok" else "SOMETHING IS WRONG")


def main(arguments: list[str] | None = None) -> None:
    """Run one command line (the process's own by default) and exit with its code."""
    run(arguments, alone(demo), "python -m tests.demo")
