"""Defects around logs that were cut: old bytes behind their end, fingerprints, what is compared while following, places
written anew.
"""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

STALE = "tests/rocketmq/test_dispatcher_stale.py"
SCRUBBER = "tests/rocketmq/test_scrubber.py"
LOG = "tests/rocketmq/test_commitlog.py"
SKIPPED = "tests/rocketmq/test_dispatcher_skipped.py"
WRITER = "tests/rocketmq/test_store_writer.py"
REWRITTEN = "tests/rocketmq/test_messages_rewritten.py"

MUTANTS = (
    Mutant(
        "stale-bytes-complete-a-message",
        "half a message is put with the keys of the one that stood there before",
        "rocketmq/follow/tail.py",
        "if now == last_read or (again.end == batch.end and not any(behind[:BLANK_BYTES])):",
        "if True:",
        (f"{STALE}::test_half_a_message_that_old_bytes_complete_is_not_put",),
    ),
    Mutant(
        "stale-no-second-look",
        "a last message with old bytes behind it waits until the next one is written",
        "rocketmq/follow/tail.py",
        "now == last_read or (again.end == batch.end and not any(behind[:BLANK_BYTES])",
        "again.end == batch.end and not any(behind[:BLANK_BYTES]",
        (f"{STALE}::test_a_whole_message_before_old_bytes_is_put_at_the_second_look[False]",),
    ),
    Mutant(
        "stale-any-second-look",
        "a message that is still being written is put at the second look, whatever was seen at the first",
        "rocketmq/follow/tail.py",
        "if now == last_read or (again.end",
        "if last_read is not None or (again.end",
        (f"{STALE}::test_a_message_whose_bytes_change_at_every_look_waits",),
    ),
    Mutant(
        "stale-head-proves",
        "the head of a message from before the cut proves the one before it",
        "rocketmq/follow/tail.py",
        "return store_ms is None or store_ms >= (batch.last_store_ms or 0)",
        "return True",
        (f"{STALE}::test_older_messages_ahead_prove_nothing",),
    ),
    Mutant(
        "stale-messages-ahead-prove",
        "messages from before the cut prove that all before them is written",
        "rocketmq/follow/tail.py",
        "batch.end <= self.end and (batch.last_store_ms or 0) <= self.store_ms",
        "batch.end <= self.end",
        (f"{STALE}::test_older_messages_ahead_prove_nothing",),
    ),
    Mutant(
        "stale-fingerprint-of-another-reading",
        "the fingerprint is of what the broker has written since the keys were read",
        "rocketmq/follow/dispatcher.py",
        "for fingerprint in fingerprints_of(batch):",
        'for fingerprint in fingerprints_of(\n            replace(batch, data=self.store.commitlog.joinpath("0" * 20).read_bytes()[batch.begin :])\n        ):',
        (f"{STALE}::test_what_is_finished_while_it_is_put_is_noticed",),
    ),
    Mutant(
        "stale-called-half-a-message",
        "what a broker left where it cut its log is reported as half a message",
        "rocketmq/follow/tail.py",
        """written < _TORN_HEAD_BYTES or (
        data[4:8] in _MAGICS and int.from_bytes(data[28:_TORN_HEAD_BYTES], "big") == position
    """,
        'True or (data[4:8] in _MAGICS and int.from_bytes(data[28:_TORN_HEAD_BYTES], "big") == position',
        (f"{STALE}::test_half_a_message_and_older_bytes_are_told_apart[30]",),
    ),
    Mutant(
        "follow-no-scrubber",
        "a cut deeper than what a round compares is noticed at the next start only",
        "rocketmq/follow/fingerprints.py",
        "self.compare_all = changed or self.step(",
        "self.compare_all = changed or (lambda *_: False)(",
        (f"{SCRUBBER}::test_a_byte_that_is_changed_far_back_is_noticed_without_a_start[40]",),
    ),
    Mutant(
        "follow-scrubber-stays-with-the-newest",
        "what is compared little by little is always the same stretch",
        "rocketmq/follow/fingerprints.py",
        "self._range, self._below = None, min(below, one.end - 1)",
        "self._range = None",
        (f"{SCRUBBER}::test_a_byte_that_is_changed_far_back_is_noticed_without_a_start[40]",),
    ),
    Mutant(
        "follow-scrubber-in-one-go",
        "a round reads hundreds of MiB to compare them",
        "rocketmq/follow/fingerprints.py",
        "min(SCRUB_BYTES, one.end - self._at)",
        "one.end - self._at",
        (f"{SCRUBBER}::test_what_stays_as_it_was_is_compared_over_and_over_in_bounded_steps",),
    ),
    Mutant(
        "skipped-has-no-fingerprint",
        "what a broker writes over damage that was passed over is never read",
        "rocketmq/follow/fingerprints.py",
        "        if one.size\n",
        "        if one.whole is None\n",
        (f"{SKIPPED}::test_what_is_written_over_a_skipped_range_is_read[1-False]",),
    ),
    Mutant(
        "skipped-blank-has-no-fingerprint",
        "what a broker writes in place of a blank that a crash lost is never read",
        "rocketmq/log/commitlog.py",
        "if at < segment.end:\n                    head",
        "if False:\n                    head",
        (f"{SKIPPED}::test_messages_in_place_of_a_blank_that_was_lost_are_read",),
    ),
    Mutant(
        "skipped-after-it-was-finished",
        "a message that is written while damage is remembered is remembered as damage, and passed over",
        "rocketmq/log/commitlog.py",
        "return None if self._is_message(segment, begin) else NonMessage(",
        "return NonMessage(",
        (f"{SKIPPED}::test_damage_that_is_finished_before_it_is_passed_over_is_a_message",),
    ),
    Mutant(
        "messages-with-holes",
        "messages read while they are written come with zeros in their keys",
        "rocketmq/log/commitlog.py",
        "message = self.read(message.physical_offset)",
        "pass",
        (f"{LOG}::test_messages_beside_a_writer_have_all_their_properties_or_wait",),
    ),
    Mutant(
        "messages-list-the-folder",
        "every single message costs a listing of all segments",
        "rocketmq/log/commitlog.py",
        "for segments in self._looked[:1]:",
        "for segments in self._looked[:0]:",
        (f"{LOG}::test_single_messages_list_the_folder_only_where_the_last_look_does_not_give_them",),
    ),
    Mutant(
        "writer-recovers-half-a-message",
        "recovery keeps a message whose properties were cut",
        "rocketmq/store_writer.py",
        "closed=StoreDirectory.open(self.root).is_closed",
        "closed=True",
        (f"{WRITER}::test_a_last_message_cut_within_its_properties_is_cut_off_unless_the_store_was_closed[False]",),
    ),
    Mutant(
        "rewritten-earlier-is-missing",
        "a message is missing where the entry of the one that stood there before is newer",
        "service/lookup/messages.py",
        "one.instead is not None else None",
        "False else None",
        (f"{REWRITTEN}::test_the_message_of_an_earlier_time_is_found[local-1-body]",),
    ),
    Mutant(
        "rewritten-outside-the-range",
        "a message is answered that isn't of the asked times",
        "service/lookup/messages.py",
        "in_range = self._second_min <= own.timestamp_ms // 1000 <= self._second_max",
        "in_range = True",
        (f"{REWRITTEN}::test_a_range_that_the_message_is_not_of_has_none[local]",),
    ),
    Mutant(
        "rewritten-without-an-entry",
        "a damaged store time passes for another message of the key",
        "rocketmq/archive/search.py",
        "            if not self._is_of_the_second(message):\n",
        "            if False:\n",
        (f"{REWRITTEN}::test_what_the_index_has_no_entry_of_is_missing[local]",),
    ),
)
