"""More readers to ask: of the root, of only the storage, with their own cache, of one or two indexes as several.

Each answer must equal a model of the reader's view. A reader of the root sees flushed entries. A reader of the storage
sees the entries that the log names at the reader's position; the codec alone takes them from the objects. Any other
reader continues a page's cursor, in any later state.
"""

import random
from dataclasses import replace
from functools import cached_property

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, consumes, rule

from tests.property.index_machine import (
    ALL,
    KEYS,
    TOPICS,
    IndexMachine,
    asked_keys,
    asked_topics,
    compare_page,
    counts,
    ranges,
    seeded,
)
from tests.property.published import Published
from tests.support.disk_faults import FaultDisk
from tests.support.model import Answer, ReferenceModel
from tiered_index import IndexReader, IndexService, Lookup
from tiered_index.service.read.answers.merged import index_number
from tiered_index.storage.opening import open_storage

PLAIN = ("service", "beside", "stateless", "caching")
SOURCED = ("one", "two")
# readers of several indexes; their cursors differ from those of one
sizes = st.sampled_from([2, 5, 9])
askers = st.sampled_from(PLAIN + SOURCED)
plain_askers = st.sampled_from(PLAIN)


class ReadingMachine(IndexMachine):
    cursors = Bundle("cursors")

    def __init__(self):
        super().__init__()
        self.readers = {}
        self.beyond = None

    def teardown(self):
        for reader in self.readers.values():
            reader.close()
        super().teardown()

    # The readers

    @property
    def published(self):
        if not hasattr(self, "_published"):
            self._published = Published(self.where.inner, KEYS, keyed=self.keyed)
        return self._published

    def index(self, who):
        """Return the index to ask: the service, or a reader that lives from one question to the next."""
        if who == "service":
            return self.service
        if who not in self.readers:
            self.readers[who] = self.reader(who)
        return self.readers[who]

    def reader(self, who):
        settings = {"clock": self.clock, "query_threads": 2, **self.caches}
        if who == "beside":
            return IndexReader.open(root=self.settings["root"], storage_backend=self.storage, **settings)
        if who in SOURCED:
            uris = [self.where.uri] if who == "one" else [self.second_index(), self.where.uri]
            return IndexReader.open(uris, **settings)
        if who == "caching":
            settings["cache_dir"] = self.folder / "cache"
        return IndexReader.open(storage_backend=self.storage, **settings)

    @cached_property
    def second_uri(self):
        """Return the second index's URI as entries name it."""
        with open_storage(self.where.second) as storage:
            return storage.uri

    def second_index(self):
        """Make the other index once, with messages of the same places and times as this one's; return its URI."""
        if self.beyond is None:
            self.beyond = ReferenceModel(keyed=self.keyed)
            layout = {name: self.settings[name] for name in ("preset", "slots", "items")}
            root = self.folder / "second"
            where = {"root": root, "storage": self.where.second, "clock": self.clock, "disk": FaultDisk()}
            with IndexService.open(background=False, **where, **layout) as second:
                self.second_number = index_number(second.index_id)
                # all messages with which the first index may be seeded, so that places and times are equal
                for message in [message for seed in range(3) for message in seeded(random.Random(seed))]:
                    self.beyond.put(*message)
                    second.put(*message)
                second.seal()
                second.run_lifecycle()
        return self.where.second

    # The expected answers

    def state_of(self, who):
        """Return the log as a reader sees it now."""
        index = self.index(who)
        return index._views[-1].log_state if who in SOURCED else index.log_state

    def model_of(self, who, state=None):
        """Return the model of a reader's last view, or of its view at a state of the log."""
        if who == "service":
            return self.model
        if who == "beside":
            return self.durable
        published = self.published.model(state or self.state_of(who))
        if who not in SOURCED:
            return published
        joined = ReferenceModel(keyed=self.keyed, extra=["source"], identity=["source"])
        number = index_number(self.service.index_id)
        models = {number: published} | ({self.second_number: self.beyond} if who == "two" else {})
        for source, model in models.items():
            for e in model.entries:
                joined.put(e.topic, e.queue_id, e.key, e.offset, e.size, e.second * 1000, source=source)
        return joined

    def answers(self, who, result):
        if who not in SOURCED:
            assert all(item.source is None for item in result)
            return [Answer.of(item) for item in result]
        numbers = {self.storage.uri: index_number(self.service.index_id)}
        if who == "two":
            numbers[self.second_uri] = self.second_number
        return [replace(Answer.of(item), extra=(("source", numbers[item.source]),)) for item in result]

    def ask(self, who, topic, key, limits, count, cursor=None, many=False, **how):
        """Look up; a reader beside the writer may do so only if the flushed entries are known."""
        index = self.index(who)
        if many:
            results = index.query_many([Lookup(topic, "none"), Lookup(topic, key, *limits, count, cursor)], **how)
            assert len(results[0]) == 0
            return results[1]
        return index.query(topic, key, *limits, count, cursor, **how)

    def settle(self, who):
        """Flush if the flushed entries are not known, which a reader of the root would see."""
        if who == "beside" and self.half_flushed:
            self.work("flush")

    def check(self, who, result, topic, key, limits, count, after=None, model=None):
        expected = (model or self.model_of(who)).query(topic, key, *limits, count + 1, after)
        compare_page(self.answers(who, result), result, expected, count)
        assert result.failed == ()
        if result.status == "truncated" and who == "service":
            assert result.explain.files_skipped or len(expected) > count

    # The rules

    @rule(who=askers, topic=asked_topics, key=asked_keys, limits=ranges, count=counts, many=st.booleans())
    def ask_somebody(self, who, topic, key, limits, count, many):
        self.settle(who)
        self.check(who, self.ask(who, topic, key, limits, count, many=many), topic, key, limits, count)

    @rule(who=askers)
    def let_a_reader_go(self, who):
        if who in self.readers:
            self.readers.pop(who).close()

    @rule(who=askers)
    def ask_a_reader_to_refresh(self, who):
        if who != "service":
            self.index(who).refresh()
            if who == "stateless":
                assert self.readers[who].log_state.number == self.service.log_state.number

    @rule(who=askers)
    def ask_for_everything(self, who):
        self.settle(who)
        for topic in TOPICS:
            results = self.index(who).query_many([Lookup(topic=topic, key=key, max_count=ALL) for key in KEYS])
            for key, result in zip(KEYS, results, strict=True):
                self.check(who, result, topic, key, (None, None), ALL)

    @rule(target=cursors, who=askers, topic=asked_topics, key=asked_keys, limits=ranges, many=st.booleans())
    def begin_paging(self, who, topic, key, limits, many):
        self.settle(who)
        result = self.ask(who, topic, key, limits, 1, many=many)
        self.check(who, result, topic, key, limits, 1)
        return (who in SOURCED, topic, key, limits, result.cursor, self.end_of(who, result, None))

    @rule(target=cursors, place=consumes(cursors), which=st.integers(0, 3), count=counts, many=st.booleans())
    def next_page(self, place, which, count, many):
        """Ask any reader for the page after a cursor, whatever happened since the cursor was made."""
        sourced, topic, key, limits, cursor, after = place
        if cursor is None:
            return place
        who = SOURCED[which % 2] if sourced else PLAIN[which]
        self.settle(who)
        result = self.ask(who, topic, key, limits, count, cursor, many=many)
        self.check(who, result, topic, key, limits, count, after)
        return (sourced, topic, key, limits, result.cursor, self.end_of(who, result, after))

    @rule(sourced=st.booleans(), first=st.integers(0, 3), key=asked_keys, limits=ranges, count=sizes)
    def page_to_the_end_by_all(self, sourced, first, key, limits, count):
        """Ask for each page by the next of those readers that see everything."""
        self.work("seal_and_run")
        self.service.run_lifecycle()
        group = ("two",) if sourced else PLAIN
        for who in group:
            if who != "service":
                self.index(who).refresh()
        models = {who: self.model_of(who) for who in group}
        cursor, after, pages = None, None, 0
        while cursor is not None or not pages:
            who = group[(first + pages) % len(group)]
            result = self.ask(who, "orders", key, limits, count, cursor, many=pages % 3 == 2)
            self.check(who, result, "orders", key, limits, count, after, models[who])
            cursor, pages = result.cursor, pages + 1
            after = models[who].order_key_of(self.answers(who, result)[-1]) if len(result) else after
            assert pages < 2000

    def end_of(self, who, result, after):
        return self.model_of(who).order_key_of(self.answers(who, result)[-1]) if len(result) else after

    @rule(
        who=st.sampled_from(PLAIN), questions=st.lists(st.tuples(asked_topics, asked_keys, ranges, counts), max_size=6)
    )
    def query_many(self, who, questions):
        """A batch answers as single lookups do; each second one continues from a cursor, if there is one."""
        self.settle(who)
        lookups, afters = [], []
        for number, (topic, key, limits, count) in enumerate(questions):
            first = self.ask(who, topic, key, limits, 1)
            goes_on = number % 2 and first.cursor is not None
            lookups.append(Lookup(topic, key, *limits, count, first.cursor if goes_on else None))
            afters.append(self.end_of(who, first, None) if goes_on else None)
        for q, after, result in zip(lookups, afters, self.index(who).query_many(lookups), strict=True):
            self.check(who, result, q.topic, q.key, (q.begin_ms, q.end_ms), q.max_count, after)

    @rule()
    def fresh_readers_see_what_is_flushed_and_published(self):
        self.work("seal_and_run")
        for root in (self.settings["root"], None):
            with IndexReader.open(root=root, storage_backend=self.storage, clock=self.clock) as reader:
                self.check_all(reader.query, self.durable)
                stored = sum(o.count for o in self.service.log_state.objects.values())
                assert root or sum(handle.count for handle in reader.files()) == stored
