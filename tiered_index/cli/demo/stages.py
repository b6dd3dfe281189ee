"""The demo's stages: what happens to the stream, one method each, in the order in which `command` calls them.

Figures gather in `figures`. A broker's process writes the stream into a store. The ingesting process follows it live, and dies twice; the
stream's newest part is dispatched in this process and goes through the states one by one, with every question asked in each. One thread
beside the engine's own.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tiered_index.cli.demo.broker import Broker, placed
from tiered_index.cli.demo.census import Census, take_census
from tiered_index.cli.demo.follower import Follower, upload_under_way
from tiered_index.cli.demo.lookups import Lookups, Question, questions_of
from tiered_index.cli.putting import PatientPut
from tiered_index.config import IndexConfig
from tiered_index.errors import StorageUnavailable
from tiered_index.format.names import DATA_PREFIX
from tiered_index.rocketmq.follow.dispatcher import Dispatcher
from tiered_index.rocketmq.log.store import StoreDirectory
from tiered_index.service.index import IndexService
from tiered_index.service.reader import IndexReader
from tiered_index.storage.base import Storage
from tiered_index.storage.opening import open_storage
from tiered_index.storage.wrappers import Call, WrapperStorage
from tiered_index.testing.reference import ReferenceAnswers
from tiered_index.testing.workload import TOPICS, Workload

__all__ = ["Geometry", "Stages", "geometry_of"]

_TAIL_SHARE = 0.05
_FILES = 9
_MAX_ITEMS = 1 << 18
_ITEM_BYTES, _SLOT_BYTES = 32, 8
_OBJECT_BYTES = 6 << 20
# more than one part of 5 MiB, so that there is an upload to be killed in the middle of
_FIRST_KILL_FILES = _FILES // 2
_PATIENCE_S = 60.0
_PAGE, _COLD_PAGE = 1000, 5000

Say = Callable[[str], None]


@dataclass(frozen=True)
class Geometry:
    """Slots and items of the demo's files."""

    slots: int
    items: int


def geometry_of(entries: int) -> Geometry:
    """Return a geometry that gives some nine files, each an object of 6 to 10 MiB."""
    items = min(_MAX_ITEMS, max(2, entries // _FILES))
    return Geometry(max(items // 4, (_OBJECT_BYTES - _ITEM_BYTES * items) // _SLOT_BYTES), items)


class _Outage(WrapperStorage):
    """A storage that takes no index files while it is `down`; what it has stays readable."""

    def __init__(self, inner: Storage) -> None:
        super().__init__(inner)
        self.down = False

    def _around(self, call: Call, act: Callable[[], Any]) -> Any:
        if self.down and call.operation in ("put", "begin_upload") and call.name.startswith(DATA_PREFIX):
            raise StorageUnavailable(f"simulated outage: {call.operation} of {call.name}")
        return act()


@dataclass
class Stages:
    """One run of the demo."""

    config: IndexConfig
    folder: Path
    messages: int
    lookups: int
    cold_lookups: int
    seed: int
    say: Say
    closing: contextlib.ExitStack
    config_file: Path | None = None
    figures: dict[str, Any] = field(default_factory=dict)

    def generate(self) -> None:
        """Make the stream and the expected answers, and start the broker's process."""
        drawn = Workload.generate(self.messages, seed=self.seed)
        self.workload = workload = placed(drawn)
        self.tail_start = int(len(workload) * (1 - _TAIL_SHARE))
        self.geometry = geometry_of(workload.entries)
        self.store = self.folder / "store"
        self.broker = self.closing.enter_context(Broker(drawn, self.store, self.folder, self.tail_start))
        self.asked = Lookups(ReferenceAnswers(workload))
        self.hottest = Question(TOPICS[0], workload.keys[0])
        days = (int(workload.timestamp_ms.max()) - int(workload.timestamp_ms.min())) / 86_400_000
        self.figures |= {"messages": len(workload), "entries": workload.entries, "days": round(days, 1), "late": int(workload.late.sum()),
                         "topics": len(TOPICS)}  # fmt: skip
        late = self.figures["late"]
        self.say(f"{len(workload):,} messages ({late:,} of them late), {workload.entries:,} entries, {days:.1f} days")

    def follow_and_die(self) -> None:
        """Run the ingesting process beside the broker three times: killed while it writes, killed in an upload, to the end of the log."""
        assert self.config.root is not None and self.config.storage is not None
        follower = Follower(self.store, self.config.root, self.config.storage, self.geometry.slots, self.geometry.items, self.config_file)
        store = StoreDirectory.open(self.store)
        end = int(self.workload.offset[self.tail_start - 1] + self.workload.size[self.tail_start - 1])
        kills: list[dict[str, Any]] = []

        def over() -> bool:
            """Return whether all is written, taken and uploaded."""
            written = store.log_end()
            return written is not None and written.offset >= end and follower.files_begun() >= _FILES - 1 and follower.is_idle()

        with open_storage(self.config.storage, options=self.config.s3) as storage:
            moments: list[tuple[str, Callable[[], bool]]] = [
                ("while writing", lambda: follower.files_begun() >= _FIRST_KILL_FILES),
                ("in the middle of an upload", lambda: upload_under_way(storage)),
            ]
            for text, moment in moments:
                if follower.run_until(moment, over):
                    written = store.log_end()
                    recovered = follower.recover()
                    position = max(recovered["sources"].values(), default=0)
                    kills.append({
                        "moment": text, "resumed_from": position, "log_end": written.offset if written is not None else 0,
                        "notes": len(recovered["notes"]),
                    })  # fmt: skip
                    self.say(f"SIGKILL {text}; {_told(recovered['notes'])}; goes on at byte {position:,} of the commit log")
                else:
                    self.say(f"the process was too fast to be killed {text}")
        self.broker.wait_written()
        summary = follower.finish(end)
        self.figures["kills"] = kills
        self.say(f"the same command again took bytes {summary['resumed_from']:,} to {summary['position']:,}; files: {summary['files']}")

    def walk_the_states(self) -> None:
        """Take the newest messages through every state in this process, and ask in each."""
        self.broker.write_tail()
        questions = questions_of(self.workload, self.tail_start, self.lookups, self.seed)
        outage = _Outage(open_storage(str(self.config.storage), options=self.config.s3))
        with IndexService.open(self.config, storage_backend=outage) as index:
            started_s = time.monotonic()
            entries = self._dispatch_tail(index)
            put_s = time.monotonic() - started_s
            self._ask("write buffer", index, questions)
            started_s = time.monotonic()
            index.flush()
            self.figures["ingest_entries_per_s"] = round(entries / (put_s + time.monotonic() - started_s))
            self._ask("unsealed file", index, questions)
            outage.down = True
            index.seal()
            started_s = time.monotonic()
            try:
                index.run_lifecycle()
            except StorageUnavailable as error:
                self.say(f"compacted, and kept locally while the storage is away ({error})")
            self.figures["compact_entries_per_s"] = round(entries / (time.monotonic() - started_s))
            self._ask("compacted file", index, questions)
            outage.down = False
            index.run_lifecycle()
            self._ask("uploaded, local copy", index, questions, paged=True)
            self.figures["upload_bytes"] = sum(o.size_bytes for o in index.log_state.objects.values())

    def read_without_state(self) -> Census:
        """Ask a reader that has nothing but the storage's URI, then count every entry in the storage."""
        questions = questions_of(self.workload, self.tail_start, self.cold_lookups, self.seed + 1)
        with IndexReader.open(config=self.config.model_copy(update={"root": None})) as reader:
            self._ask("storage only, first", reader, questions[:1])
            self._ask("storage only", reader, questions[1:], paged=True, page=_COLD_PAGE)
            census = take_census(reader, self.workload)
        self.figures |= {
            "entries_expected": census.expected, "entries_stored": census.stored, "entries_repeated": census.repeated,
            "entries_lost": census.lost, "entries_strange": census.strange,
            "lookups": [measured.to_dict() for measured in self.asked.done],
            "wrong_answers": sum(len(measured.wrong) for measured in self.asked.done),
            "wrong": [text for measured in self.asked.done for text in measured.wrong][:5],
        }  # fmt: skip
        return census

    def _dispatch_tail(self, index: IndexService) -> int:
        dispatcher = Dispatcher(index, StoreDirectory.open(self.store), put=PatientPut(index, _PATIENCE_S))
        entries = 0
        while True:
            done = dispatcher.run_once()
            entries += done.entries
            if done.caught_up:
                break
        log = [path.stat().st_size for path in dispatcher.store.commitlog.iterdir()]
        self.figures |= {"log_bytes": dispatcher.position, "log_segments": len(log)}
        return entries

    def _ask(
        self, place: str, index: IndexService | IndexReader, questions: list[Question], *, paged: bool = False, page: int = _PAGE
    ) -> None:
        files = dict(Counter(handle.place for handle in index.files()))
        measured = self.asked.ask(place, files, index.query, questions, paged=self.hottest if paged else None, page=page)
        wrong = f", {len(measured.wrong)} WRONG" if measured.wrong else ""
        self.say(f"{place}: {len(measured.latencies_ms):,} look-ups, {measured.answers:,} answers{wrong}")


def _told(notes: list[str]) -> str:
    if not notes:
        return "recovered, nothing was half-made"
    more = f" (and {len(notes) - 1} more)" if len(notes) > 1 else ""
    return f"recovered: {notes[0]}{more}"
