"""Defects of archived segments and of messages as answers."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

ARCHIVE = "tests/unit/service/test_segment_archive.py"
CLOSED = "tests/rocketmq/test_archive.py"
FOLLOWED = "tests/rocketmq/test_archive_followed.py"
FETCHING = "tests/unit/service/test_messages.py"
MESSAGES = "tests/rocketmq/test_messages.py"
DAMAGED = "tests/rocketmq/test_messages_damaged.py"
APART = "tests/rocketmq/test_messages_apart.py"
PAGES = "tests/rocketmq/test_messages_pages.py"
CUT_OFF = "tests/rocketmq/test_messages_cut_off.py"
UNIQUE = "tests/integration/cli/test_message_unique_key.py"

MUTANTS = (
    Mutant(
        "segment-closed-too-early",
        "a file made in advance closes the segment before it",
        "rocketmq/archive/archive.py",
        'if pread(segments[last].path, BLANK_BYTES, 0).strip(b"\\0"):',
        "if segments[last].path:",
        (f"{CLOSED}::test_the_segment_being_written_waits_until_the_next_one_is_written_to",),
    ),
    Mutant(
        "segment-cut-short-archived",
        "a segment that was cut short is archived as it is",
        "rocketmq/archive/archive.py",
        "if segment.file_size < segment.end - segment.start:",
        "if segment.file_size < 0:",
        (f"{CLOSED}::test_a_segment_that_was_cut_short_is_named_and_the_others_go_up",),
    ),
    Mutant(
        "segment-rewrite-unseen",
        "a rewritten segment is known by its head alone",
        "service/lifecycle/segment_archive.py",
        "modified_ms is None or modified_ms >= known.published_ms",
        "modified_ms is None",
        (f"{ARCHIVE}::test_a_younger_file_is_compared_whole_and_an_older_one_by_its_head",),
    ),
    Mutant(
        "segment-not-taken-archived",
        "a segment that the follower stopped at is archived, and the broker writes it anew",
        "rocketmq/archive/archive.py",
        "if segment.end <= taken]",
        "if segment.end > 0]",
        (f"{FOLLOWED}::test_what_is_not_taken_is_not_archived",),
    ),
    Mutant(
        "segment-replaced-by-damage",
        "a copy from after the rewrite is replaced by whatever the file has become",
        "service/lifecycle/segment_archive.py",
        """(
                    rewritten_ms is not None and known.published_ms <= rewritten_ms and known.size_bytes == size_bytes
                )""",
        "rewritten_ms is not None and known.size_bytes == size_bytes",
        (f"{ARCHIVE}::test_a_segment_that_is_known_to_be_rewritten_replaces_its_copy_by_one_record",),
    ),
    Mutant(
        "segment-rewrite-forgotten",
        "a follower that was started again doesn't know that a segment was rewritten",
        "rocketmq/follow/fingerprints.py",
        "stored, ranges, made.continue_at, made.rewritten, made",
        "stored, ranges, made.continue_at, _, made",
        (f"{FOLLOWED}::test_a_segment_that_the_broker_wrote_anew_replaces_its_copy[True]",),
    ),
    Mutant(
        "segment-overlap-allowed",
        "a segment that overlaps an archived one is archived, too",
        "service/lifecycle/segment_archive.py",
        "if other.start < start + size_bytes and start < other.end:",
        "if other.start == start:",
        (f"{ARCHIVE}::test_a_segment_that_overlaps_another_one_is_refused",),
    ),
    Mutant(
        "segment-sweep-of-newer-writers",
        "a writer that was taken over sweeps the new one's upload",
        "service/lifecycle/segment_archive.py",
        "return segment_epoch(name) <= self.session.epoch",
        "return segment_epoch(name) > 0",
        (f"{ARCHIVE}::test_the_sweep_of_an_older_epoch_spares_a_newer_upload",),
    ),
    Mutant(
        "segment-orphans-kept",
        "what a crash left of an upload stays for ever",
        "service/lifecycle/segment_archive.py",
        "if info.name not in state.archive and self._is_left(info.name):",
        "if info.name in ():",
        (f"{ARCHIVE}::test_what_a_crash_left_is_swept_by_the_next_run",),
    ),
    Mutant(
        "segment-of-fenced-writers-kept",
        "a fenced writer leaves its upload behind",
        "service/lifecycle/publication.py",
        "if is_over or isinstance(error, WriterFenced):",
        "if is_over:",
        (f"{ARCHIVE}::test_a_writer_fenced_between_upload_and_record_takes_its_object_back",),
    ),
    Mutant(
        "segment-sent-twice",
        "after an unknown outcome a segment is uploaded once more",
        "service/lifecycle/segment_archive.py",
        "session, sent = self.session, self._sent.get(place)",
        "session, sent = self.session, None",
        (f"{ARCHIVE}::test_a_record_of_unknown_outcome_is_there_once",),
    ),
    Mutant(
        "segment-forgotten-by-checkpoints",
        "a checkpoint does not hold the archived segments",
        "service/log/state.py",
        "optional_members(self.archive.values(), ",
        "optional_members([], ",
        (f"{ARCHIVE}::test_a_checkpoint_with_segments_comes_back_as_it_was",),
    ),
    Mutant(
        "segment-archived-twice",
        "a second segment at the same place is taken in",
        "service/log/state.py",
        " or segment.place in places:",
        ":",
        (f"{ARCHIVE}::test_a_place_is_archived_once",),
    ),
    Mutant(
        "stale-log-called-expired",
        "what was archived since the log was last read is called expired",
        "rocketmq/archive/messages.py",
        "                archive.refresh()\n",
        "                pass\n",
        (f"{DAMAGED}::test_a_reader_that_is_behind_the_log_reads_it_before_it_says_expired",),
    ),
    Mutant(
        "collisions-answered",
        "a message of another key with an equal hash is an answer",
        "rocketmq/log/message.py",
        "self.topic == topic and key in (*self.index_keys, *([layout.tag_key(self.tags)] if self.tags else []))",
        "self.topic == topic",
        (f"{APART}::test_keys_of_equal_hash_are_told_apart",),
    ),
    Mutant(
        "collisions-of-topics-answered",
        "a message of another topic is an answer",
        "rocketmq/log/message.py",
        "self.topic == topic and key in",
        "key in",
        (f"{APART}::test_an_entry_of_another_topic_is_a_collision",),
    ),
    Mutant(
        "rewritten-messages-answered",
        "a message of another queue or time passes for the one that was indexed",
        "rocketmq/archive/search.py",
        "problem = self._contradiction(message)",
        "problem = None",
        (f"{DAMAGED}::test_a_log_that_was_written_anew_gives_no_wrong_message",),
    ),
    Mutant(
        "gaps-called-expired",
        "every offset that no segment holds is called expired",
        "rocketmq/archive/messages.py",
        "elif search.offset < begin:",
        "elif begin is not None:",
        (f"{MESSAGES}::test_a_gap_in_the_log_is_missing_not_expired",),
    ),
    Mutant(
        "unavailable-called-missing",
        "a storage that does not answer makes messages missing",
        "service/lookup/messages.py",
        "errors = [one.error for one in self.fetched if one.error is not None]",
        "errors = [one.error for one in ()]",
        (f"{FETCHING}::test_a_place_that_cannot_be_asked_is_an_error",),
    ),
    Mutant(
        "collisions-shorten-the-answer",
        "a page with collisions is an answer that is shorter than it says",
        "service/lookup/messages.py",
        "if len(found) >= lookup.max_count or cursor is None or",
        "if found or cursor is None or",
        (f"{FETCHING}::test_collisions_are_dropped_counted_and_paged_past",),
    ),
    Mutant(
        "cursor-past-what-was-fetched",
        "the cursor stands behind entries that were not looked at",
        "service/lookup/messages.py",
        "if behind or ahead else answer.cursor",
        "if behind else answer.cursor",
        (f"{FETCHING}::test_a_page_fetches_no_more_than_it_needs",),
    ),
    Mutant(
        "unique-key-of-others",
        "a message that has the id among its other keys is shown as the one of that id",
        "rocketmq/archive/messages.py",
        """
            one
            if one.message is None or getattr(one.message, "uniq_key", None) == key
            else replace(one, carries_key=False)
            for one in fetched
        """,
        'one if one.message is None or getattr(one.message, "uniq_key", None) == key else one for one in fetched',
        (f"{UNIQUE}::test_a_message_behind_many_that_carry_its_id_as_a_key_is_found",),
    ),
    Mutant(
        "place-without-its-state",
        "an id that names a deleted message's place is unknown as soon as a topic is given",
        "rocketmq/archive/messages.py",
        "if fetched.message is None or getattr(",
        "if getattr(",
        (f"{UNIQUE}::test_what_a_place_held_has_its_state_with_a_topic_as_without",),
    ),
    Mutant(
        "cut-off-answered",
        "what a broker cut off is answered as local until it is written over",
        "rocketmq/archive/messages.py",
        "if message is not None and truncated.has(message):",
        "if False:",
        (f"{CUT_OFF}::test_what_was_cut_off_is_missing_until_it_is_written_over_and_afterwards",),
    ),
    Mutant(
        "cut-off-while-following",
        "what a follower has not read yet passes for cut off",
        "rocketmq/follow/tail.py",
        "return batch.end, newest_ms",
        "return at, newest_ms",
        (f"{CUT_OFF}::test_what_the_follower_has_not_read_yet_is_read_up_to_its_end",),
    ),
    Mutant(
        "rewritten-answered-by-two-entries",
        "a message whose place had another one a second before is answered by both entries",
        "service/lookup/messages.py",
        "if one.message is not None and not one.is_near:",
        "if one.message is not None:",
        (f"{PAGES}::test_a_tail_written_anew_is_answered_once[-1-1]",),
    ),
    Mutant(
        "rewritten-hidden-on-its-page",
        "an entry that a newer one hides is not answered where it lies later on the page",
        "service/lookup/messages.py",
        "insort(ahead, own, key=self._order)",
        "pass",
        (f"{PAGES}::test_a_hidden_entry_further_down_its_page_is_answered_there",),
    ),
    Mutant(
        "rewritten-answered-on-two-pages",
        "a message is answered with a newer entry of its place, and on its own page",
        "service/lookup/messages.py",
        "(is_last or (ahead and self._order(own) < self._order(ahead[-1])))",
        "True",
        (f"{PAGES}::test_a_tail_written_anew_is_answered_once[-300-3]",),
    ),
)
