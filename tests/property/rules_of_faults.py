"""Faults of lookups: bounds, a storage that fails or returns wrong bytes, missing objects and replaced objects.

A partial answer has only existing entries, in order, each once. It has all entries of the files that it does not name
as failed.
"""

from hypothesis import strategies as st
from hypothesis.stateful import rule

from tests.property.index_machine import asked_keys, asked_topics, ranges
from tests.property.published import mark
from tests.property.rules_of_readers import SOURCED, ReadingMachine, askers, plain_askers
from tests.support.log_records import publish
from tiered_index.errors import BudgetExceeded, CorruptFile, PartialAnswer, StorageError
from tiered_index.service.read.answers.merged import index_number
from tiered_index.service.read.answers.results import QueryResults

counts = st.sampled_from([1, 3, 64])
# the arguments that a rule of lookups draws, besides the reader
LOOKUP = {"topic": asked_topics, "key": asked_keys, "limits": ranges, "count": counts}
LOOKUP |= {"many": st.booleans(), "partial": st.booleans()}


class StruckMachine(ReadingMachine):
    """The whole state machine."""

    # The contents of a partial answer

    def ask(self, who, *lookup, **how):
        self.before = self.state_of(who)
        return super().ask(who, *lookup, **how)

    def check_partial(self, who, result, topic, key, limits, count):
        """Check an answer that may be partial.

        A lookup that searches the log for a missing object may refresh its reader after its files were chosen. The
        answer is then that of the log before the refresh.
        """
        question = topic, key, limits, count
        now = self.state_of(who)
        try:
            self.check_partial_at(now, who, result, *question)
        except AssertionError:
            if who in ("service", "beside") or now is self.before:
                raise
            self.check_partial_at(self.before, who, result, *question)

    def check_partial_at(self, state, who, result, topic, key, limits, count):
        """Check an answer that may be partial against a state of the log."""
        model = self.model_of(who, state)
        if result.status != "partial":
            self.check(who, result, topic, key, limits, count, model=model)
            return
        answers = self.answers(who, result)
        places = [model.order_key_of(answer) for answer in answers]
        assert places == sorted(set(places), key=rank)
        identities = [(a.queue_id, a.offset, a.extra) for a in answers]
        assert len(set(identities)) == len(answers) <= count
        # each entry exists, but is not always the newest of its identity, which may be in an unread file
        there = model.matching(topic, key, *limits)
        possible = {(*model.order_key(e), e.size) for e in there}
        assert {(*place, a.size) for place, a in zip(places, answers, strict=True)} <= possible
        # none is missing from the files that were read
        newest = {(place[2], place[1], place[3]): place[0] for place in places}
        for entry in self.read(state, who, result, there):
            second, offset, queue, extra = place = model.order_key(entry)
            if len(answers) < count or rank(place) < rank(places[-1]):
                assert newest.get((queue, offset, extra), -1) >= second

    def read(self, state, who, result, there):
        """Return those of the entries `there` that must be in files which the answer does not name as failed."""
        assert result.failed
        assert all(report.outcome == "failed" and report.error for report in result.failed)
        failed = {(report.source, report.file) for report in result.failed}
        source = self.storage.uri if who in SOURCED else None
        objects = {(source, o.file_id): o for o in state.objects.values()}
        assert who not in SOURCED or {source for source, _ in failed} <= set(self.index(who).sources)
        if any(source not in (None, self.storage.uri) for source, _ in failed):
            return []  # the second index's files; this would only check how the others are merged with them
        by_mark = {self.mark_of(entry): entry for entry in there}
        unread = self.marks(who, [stored for named, stored in objects.items() if named in failed])
        if failed <= set(objects):
            # all local files were read, and every entry is in them or in an object
            return [entry for marked, entry in by_mark.items() if marked not in unread]
        if any(report.place == "storage" and (report.source, report.file) not in objects for report in result.failed):
            return []  # the log, or a file that another one has replaced in it meanwhile
        read = self.marks(who, [stored for named, stored in objects.items() if named not in failed])
        return [by_mark[marked] for marked in read if marked in by_mark]

    def marks(self, who, stored):
        source = (index_number(self.service.index_id),) if who in SOURCED else ()
        return {(*mark(entry, keyed=self.keyed), *source) for file in stored for entry in self.published.entries(file)}

    def mark_of(self, entry):
        return (*mark(entry, keyed=self.keyed), *((entry.extra["source"],) if "source" in entry.extra else ()))

    # The rules

    @rule(
        who=askers,
        **LOOKUP,
        max_requests=st.sampled_from([None, 0, 1, 2, 5]),
        max_bytes=st.sampled_from([None, 0, 100, 1_000, 5_000]),
        timeout_s=st.sampled_from([None, None, None, 1e-9, 300.0]),
        later_s=st.sampled_from([0, 0, 11]),
    )
    def ask_within_bounds(
        self, who, topic, key, limits, count, many, partial, max_requests, max_bytes, timeout_s, later_s
    ):
        self.settle(who)
        self.index(who)
        self.clock.advance(later_s)  # so that a refresh is due
        bounds = {"max_requests": max_requests, "max_bytes": max_bytes, "timeout_s": timeout_s}
        try:
            result = self.ask(who, topic, key, limits, count, many=many, allow_partial=partial, **bounds)
        except BudgetExceeded as error:
            assert not partial and any(bound is not None for bound in bounds.values())
            assert error.failed and error.failed == error.result.failed
            # of a batch, the other lookup, which covers all times, may lack a file
            result = error.result[1] if isinstance(error.result, QueryResults) else error.result
            assert many or result.status == "partial"
        except CorruptFile as error:
            # an earlier read of the log was damaged, and the bounds do not allow another one
            assert not partial and error.file.startswith("log/") and any(bound is not None for bound in bounds.values())
            return
        explain = result.explain
        assert max_requests is None or explain.requests <= max_requests
        # a record of the log is read whole, whatever its size, and may exceed the bound once
        assert max_bytes is None or explain.bytes <= max_bytes or "log" in {report.file for report in explain.files}
        self.check_partial(who, result, topic, key, limits, count)

    @rule(
        who=plain_askers,
        **LOOKUP,
        nth=st.integers(1, 4),
        times=st.sampled_from([1, 2, None]),
        trouble=st.sampled_from(["fail", "fail all", "wrong", "short", "long", "log"]),
    )
    def ask_a_storage_in_trouble(self, who, topic, key, limits, count, many, partial, nth, times, trouble):
        self.settle(who)
        self.index(who)
        if trouble.startswith("fail"):
            self.storage.fail("*" if trouble == "fail all" else "get_range", nth=nth, times=times)
        elif trouble == "log":
            self.clock.advance(11)  # so that a refresh is due
            self.storage.corrupt("get", name_prefix="log/", times=times)
        else:
            self.storage.corrupt("get_range", mode=trouble, nth=nth, times=times)
        try:
            result = self.ask(who, topic, key, limits, count, many=many, allow_partial=partial)
        except (StorageError, CorruptFile, PartialAnswer):
            assert not partial
        else:
            assert partial or result.status != "partial"
            self.check_partial(who, result, topic, key, limits, count)
        finally:
            self.storage.clear()
        self.clock.advance(2)  # a reader that could not read the log tries again

    @rule(who=askers, **LOOKUP, which=st.integers(0, 9))
    def ask_while_an_object_is_lost(self, who, topic, key, limits, count, many, partial, which):
        self.settle(who)
        self.index(who)
        names = sorted(self.service.log_state.objects)
        if not names:
            return
        stored = self.service.log_state.objects[names[which % len(names)]]
        self.published.entries(stored)
        data = self.where.inner.get(stored.name)
        self.where.inner.delete_many([stored.name])
        try:
            result = self.ask(who, topic, key, limits, count, many=many, allow_partial=partial)
        except CorruptFile as error:
            assert not partial and error.file == stored.name
        else:
            # a shard is reported by the name of its window table
            file = stored.file_id if stored.shard is None else stored.shard.table
            assert {report.file for report in result.failed} <= {file}
            assert partial or not result.failed
            self.check_partial(who, result, topic, key, limits, count)
        finally:
            self.where.inner.put(stored.name, data)

    @rule(which=st.integers(0, 9), keep=st.booleans())
    def an_object_is_replaced(self, which, keep):
        """Do as a merge: one record adds the new object and removes the old one, which is deleted now or later."""
        objects = self.service.log_state.objects
        files = {handle.file_id for handle in self.service.files() if handle.place == "storage"}
        names = sorted(name for name, stored in objects.items() if stored.file_id in files)
        if not names:
            return
        old = objects[names[which % len(names)]]
        self.published.entries(old)  # readers may be at a position at which the old object exists
        session = self.service._session
        publish(session.log, session.epoch, (self.published.rewrite(old),), remove=(old.name,))
        if not keep:
            self.where.inner.delete_many([old.name])


def rank(place):
    second, offset, queue, extra = place
    return (-second, -offset, queue, extra)
