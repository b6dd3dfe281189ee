"""New readings of files, against a model: each row of a file is shown once, at every record and after every restart."""

from dataclasses import dataclass, field

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.log_records import GENESIS
from tiered_index.format.names import TOPICS_QUEUE, linked_store
from tiered_index.format.schema import ROCKETMQ_SCHEMA
from tiered_index.service.log.records import LogRecord
from tiered_index.service.log.replaced import Replacement
from tiered_index.service.log.state import LogState
from tiered_index.service.read.answers.batch import LookupBatch
from tiered_index.types import Lookup

STORES = {linked_store("t", 0): ("t", 0), linked_store("", TOPICS_QUEUE): ("other", TOPICS_QUEUE)}


@dataclass
class Segment:
    """Offsets [start, end) of a reading; `end` is a bound until it is finished. `rows` of its `size` rows were read."""

    start: int
    end: int
    size: int
    rows: int = 0
    is_finished: bool = False
    replaces: list = field(default_factory=list)

    def finished(self, store):
        """Finish it with its true length, and return the replacements that state this."""
        self.is_finished, self.end = True, self.start + self.size
        return self.replacements(store)

    def replacements(self, store):
        return [Replacement(store, *span, self.start, self.end) for span in self.replaces]


@dataclass
class File:
    """The versions of a file, each as the offsets of its rows, and the segment that must be published before it."""

    versions: list = field(default_factory=list)


class Life:
    """One store: files are read, edited and read anew, and positions are published. The log's state is replayed."""

    def __init__(self, store):
        self.store = store
        self.files, self.queue = [], []
        self.end = self.position = 0
        first = LogRecord(1, "create", 0, "", 0, genesis=GENESIS)
        self.state = LogState().apply(LogRecord.decode(first.encode(), "log"), "log")

    def append(self, *, replaced=(), position=None):
        number = self.state.number + 1
        positions = {} if position is None else {self.store: position}
        more = {"positions": positions, "replaced": tuple(replaced), "previous": self.state.digest}
        record = LogRecord(number, "link", 1, "a", 0, **more)
        record = LogRecord.decode(record.encode(), "log")
        assert record.replaced == tuple(replaced)
        self.state = self.state.apply(record, "log")
        self.position = max(self.position, position or 0)

    def new_file(self, size):
        segment = self.reserve(size)
        self.files.append(File([([*range(segment.start, segment.start + size)], segment)]))
        self.append()

    def reserve(self, size, more=2):
        segment = Segment(self.end, self.end + size + more, size)
        self.end = segment.end
        self.queue.append(segment)
        return segment

    def edit(self, file, keeps, size):
        """The rows after the first `keeps` are others now: `size` rows, maybe none."""
        offsets, _ = file.versions[-1]
        before, old = offsets[:keeps], offsets[keeps:]
        if not old:
            return
        if not self.is_whole(file, file.versions[-1]):
            # it is never shown
            file.versions.pop()
        again = []
        for cut in [segment for segment in self.queue if span_of(segment) & set(old)]:
            cut.size = len(span_of(cut) & set(before))
            if not cut.is_finished and cut.rows >= cut.size:
                again += cut.finished(self.store)
        segment = self.reserve(size) if size else Segment(self.end, self.end, 0, is_finished=True)
        segment.replaces = spans_of(old)
        file.versions.append(([*before, *range(segment.start, segment.start + size)], segment))
        self.append(replaced=[*again, *segment.replacements(self.store)])

    def read(self, rows):
        """Read some rows of the first segment that is not read, and finish it after its last row."""
        segment = next((segment for segment in self.queue if not segment.is_finished), None)
        if segment is None:
            return
        segment.rows = min(segment.size, segment.rows + rows)
        if segment.rows == segment.size:
            self.append(replaced=segment.finished(self.store))

    def publish(self, part):
        """Publish what is read, or a part of it: entries are published in the order of their offsets."""
        read = 0
        for segment in self.queue:
            if not segment.is_finished:
                read = segment.start + segment.rows
                break
            read = segment.end
        self.append(position=self.position + (max(read - self.position, 0) * part) // 4)

    def restart(self):
        """Read the state from its checkpoint."""
        decoded = LogState.decode(self.state.encode(), "checkpoint")
        assert decoded == self.state and decoded.expired == self.state.expired
        assert decoded.encode() == self.state.encode()
        self.state = decoded

    def published_rows(self):
        """The offsets of all published entries."""
        return {
            offset
            for segment in self.queue
            for offset in range(segment.start, segment.start + segment.rows)
            if offset < self.position
        }

    def expected(self):
        """The offsets that are answers: of each file those of its newest version that is published as a whole."""
        shown, entries = set(), self.published_rows()
        for file in self.files:
            version = next(version for version in reversed(file.versions) if self.is_whole(file, version))
            shown |= entries & set(version[0])
        return shown

    def is_whole(self, file, version):
        """Whether all new readings that a version has are published. The first version is shown as far as it goes."""
        waits = [segment for segment in self.queue if segment.replaces and set(version[0]) & span_of(segment)]
        return version is file.versions[0] or all(segment.end <= self.position for segment in waits)

    def check(self):
        entries = sorted(self.published_rows())
        shown = shown_of(self.state.expired, self.store, entries)
        assert shown == sorted(self.expected())
        for store, ranges in self.state.expired.replaced.stores.items():
            assert store == self.store
            rows = ranges.hidden.rows
            assert (rows[:, 0] < rows[:, 1]).all() and (rows[1:, 0] > rows[:-1, 1]).all()
            # jobs leave out only what no later record shows
            gone = [offset for offset in entries if ranges.retired.holds(np.array([offset]))[0]]
            assert set(gone) <= set(entries) - self.expected()


def span_of(segment):
    return set(range(segment.start, segment.start + segment.size))


def spans_of(offsets):
    """Return sorted offsets as ranges [start, end)."""
    begins = [offset for offset in offsets if offset - 1 not in offsets]
    return list(zip(begins, [offset + 1 for offset in offsets if offset + 1 not in offsets], strict=True))


def shown_of(expired, store, offsets):
    """Return the offsets of entries that lookups and exports show; both must agree."""
    topic, queue_id = STORES[store]
    items = np.zeros(len(offsets), ROCKETMQ_SCHEMA.item)
    items["queue_id"], items["offset"], items["topic_id"], items["key_hash"] = queue_id, offsets, 3, 7
    seconds = np.full(len(offsets), 100)
    is_shown = expired.keeps(items, seconds, {3: topic})
    batch = LookupBatch([Lookup(topic, "k", max_count=10_000)]).hiding(expired.hidden)
    matches = batch.select(items, np.zeros(len(items), np.int64), seconds, [(3, topic)], ROCKETMQ_SCHEMA)
    assert matches.rows["offset"].tolist() == items["offset"][is_shown].tolist()
    # the same offsets of another topic or queue are others
    for other in ({3: "else"}, {3: topic}):
        apart = items.copy()
        apart["queue_id"] = 1
        assert expired.keeps(apart, seconds, other).all()
    return items["offset"][is_shown].tolist()


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("new_file"), st.integers(1, 5)),
        st.tuples(st.just("edit"), st.integers(0, 3), st.integers(0, 6), st.integers(0, 5)),
        st.tuples(st.just("read"), st.integers(1, 6)),
        st.tuples(st.just("publish"), st.integers(1, 4)),
        st.tuples(st.just("restart")),
    ),
    max_size=40,
)


@given(store=st.sampled_from(list(STORES)), steps=STEPS)
@settings(max_examples=400, deadline=None)
def test_each_row_is_shown_once_at_every_record(store, steps):
    life = Life(store)
    retired = set()
    for name, *arguments in steps:
        if name == "edit":
            number, *arguments = arguments
            if life.files:
                life.edit(life.files[number % len(life.files)], *arguments)
        else:
            getattr(life, name)(*arguments)
        life.check()
        now = {
            offset
            for ranges in life.state.expired.replaced.stores.values()
            for span in ranges.retired
            for offset in range(*span)
        }
        assert retired <= now, "a retired offset never comes back"
        retired = now
    # whatever happened, the newest version of each file is shown once all is read and published
    while any(not segment.is_finished for segment in life.queue):
        life.read(10)
    life.publish(4)
    life.check()
    assert not any(ranges.readings for ranges in life.state.expired.replaced.stores.values())
    newest = {offset for file in life.files for offset in file.versions[-1][0]}
    assert life.expected() == newest & life.published_rows()
