"""Defects of erasing: a neighbour goes, something is shown or stays, or bytes go too early."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

ERASE = "tests/unit/service/test_erase.py"
ARCHIVE = "tests/rocketmq/test_archive_erased.py"
HIDDEN = f"{ERASE}::test_it_is_hidden_in_every_state_and_goes_with_the_next_merge"
NOW = f"{ERASE}::test_now_rewrites_what_holds_it_and_certifies"

MUTANTS = (
    Mutant(
        "erase-what-no-record-can-say",
        "the log states a tombstone that no reader can read",
        "service/erasure/erase.py",
        "if not least <= (number := check_integer(name, value)) <= most:",
        "if (number := value) is None:",
        (f"{ERASE}::test_what_is_refused_leaves_the_index_as_it_was",),
    ),
    Mutant(
        "erase-the-neighbour-queue",
        "a merge leaves out all queues of a topic of which one was erased",
        "tombstones.py",
        'hidden |= mine & (items["queue_id"] == queue_id) & (seconds < begin)',
        "hidden |= mine & (seconds < begin)",
        (f"{HIDDEN}[native-queue]",),
    ),
    Mutant(
        "erase-the-neighbour-key",
        "a merge leaves out keys whose fingerprint is another one",
        "tombstones.py",
        "found &= prints == stone.fingerprint",
        "found &= True",
        (f"{ERASE}::test_with_fingerprints_a_key_of_an_equal_hash_stays",),
    ),
    Mutant(
        "erase-the-neighbour-topic",
        "a merge leaves out other topics' entries before the moment",
        "tombstones.py",
        "            mine = ids == topic_id\n",
        "            mine = ids >= 0\n",
        (f"{HIDDEN}[native-topic]",),
    ),
    Mutant(
        "erased-shown-by-one-lookup",
        "a lookup shows what was erased and is still there",
        "service/lookup/query.py",
        "kept = one.without(erased[handle.source]) if handle.source in erased else one",
        "kept = one",
        (f"{HIDDEN}[native-key]",),
    ),
    Mutant(
        "erased-shown-by-window-tables",
        "a lookup shows what was erased and lies in a window table",
        "service/lookup/query.py",
        "if handle.source in erased else one",
        'if handle.source in erased and type(handle).__name__ != "WindowTable" else one',
        (f"{HIDDEN}[native-key]",),
    ),
    Mutant(
        "erased-shown-by-hot-files",
        "a lookup of a few hot entries shows those of an erased queue",
        "service/answers/rows.py",
        "if lookup.after is not None or lookup.queues else rows",
        "if lookup.after is not None else rows",
        (f"{HIDDEN}[native-queue]",),
    ),
    Mutant(
        "erased-shown-behind-a-cursor",
        "a further page shows entries of an erased queue",
        "service/answers/rows.py",
        "    for queue_id, begin in lookup.queues:\n",
        "    for queue_id, begin in () if lookup.after is not None else lookup.queues:\n",
        (f"{HIDDEN}[native-queue]",),
    ),
    Mutant(
        "erased-shown-by-a-batch",
        "a batch of lookups shows what was erased",
        "service/lookup/query.py",
        "tuple([one.without(gone) for one in since.under(rule)])",
        "tuple(since.under(rule))",
        (f"{HIDDEN}[native-key]",),
    ),
    Mutant(
        "erased-shown-by-exports",
        "merges and exports keep what was erased",
        "retention.py",
        "        return kept & ~self.erased.hides(items, seconds, topics) if self.tombstones and len(seconds) else kept\n",
        "        return kept\n",
        (f"{ERASE}::test_an_export_and_the_topics_leave_it_out",),
    ),
    Mutant(
        "erase-deletes-before-the-record",
        "objects are deleted, and the log still names them",
        "service/erasure/erase.py",
        '        return LogRecord(0, "erase", 0, "", 0, remove=tuple(names), expired=Expired(tombstones=stones))\n',
        "        log._storage.delete_many(names)\n"
        '        return LogRecord(0, "erase", 0, "", 0, remove=tuple(names), expired=Expired(tombstones=stones))\n',
        (f"{ERASE}::test_a_storage_that_fails_at_any_call_leaves_the_old_answer_or_the_new_one",),
    ),
    Mutant(
        "erase-forgets-the-grace",
        "bytes are deleted though jobs may still read them",
        "service/erasure/erase.py",
        "removed_s=grace_s)",
        "removed_s=0)",
        (f"{ERASE}::test_objects_of_nothing_else_go_by_the_record_itself",),
    ),
    Mutant(
        "erase-removes-a-table-for-one-shard",
        "a window table goes whole since one of its shards holds nothing else",
        "service/erasure/erase.py",
        "for group in groups(state) if all(map(is_hidden, group))",
        "for group in groups(state) if any(map(is_hidden, group))",
        (f"{ERASE}::test_a_table_of_which_one_shard_is_erased_stays",),
    ),
    Mutant(
        "erase-trusts-what-it-could-not-read",
        "the certificate calls an index erased of which an object can't be read",
        "service/erasure/erase.py",
        "if held.hidden or held.problem)),",
        "if held.hidden)),",
        (f"{ERASE}::test_the_certificate_tells_what_remains",),
    ),
    Mutant(
        "erased-readable-by-all",
        "versions that don't know tombstones show what was erased",
        "retention.py",
        "            return 3\n",
        "            return 2\n",
        (f"{ERASE}::test_the_record_and_its_checkpoint_are_refused_by_who_does_not_know_them",),
    ),
    Mutant(
        "tombstones-forgotten-by-others",
        "a tombstone takes the place of one that reaches further",
        "tombstones.py",
        "            and self.before_ms >= other.before_ms\n",
        "",
        (f"{ERASE}::test_what_others_cover_is_dropped_and_their_number_is_bounded",),
    ),
    Mutant(
        "erased-segment-is-rewritten-by-the-follower",
        "a follower takes a segment for another one since messages of it were erased",
        "service/lifecycle/segment_archive.py",
        "    whole, expected = known.source or (known.crc32, known.head_crc32)\n",
        "    whole, expected = known.crc32, known.head_crc32\n",
        (f"{ARCHIVE}::test_bodies_and_properties_go_and_everything_else_stays",),
    ),
    Mutant(
        "erased-segment-is-swept-by-a-writer",
        "a starting writer deletes a segment that is about to be named",
        "service/erasure/segments.py",
        "_NO_EPOCH = 10**20 - 1\n",
        "_NO_EPOCH = 0\n",
        (f"{ARCHIVE}::test_a_starting_writer_does_not_sweep_what_is_about_to_be_named",),
    ),
    Mutant(
        "erased-segment-over-another",
        "a segment is put in the place of one that was rewritten meanwhile, and what was erased there comes back",
        "service/erasure/segments.py",
        "        if there is None or there.name != segment.name:\n"
        "            return None\n"
        '        return LogRecord(0, kind, 0, "", 0, archive=(fresh,), remove=(segment.name,))\n',
        "        if there is None:\n"
        "            return None\n"
        '        return LogRecord(0, kind, 0, "", 0, archive=(fresh,), remove=(there.name,))\n',
        (f"{ARCHIVE}::test_of_two_that_rewrite_one_segment_at_once_the_second_goes_on_from_there",),
    ),
    Mutant(
        "erased-segment-counts-for-both",
        "the certificate counts a segment that another eraser had rewritten before",
        "service/erasure/segments.py",
        "                if one.fresh.name in state.archive:\n",
        "                if state.archive:\n",
        (f"{ARCHIVE}::test_of_two_that_rewrite_one_segment_at_once_the_second_goes_on_from_there",),
    ),
    Mutant(
        "erased-segment-that-nobody-read",
        "the certificate calls an index erased of which a segment can't be read",
        "service/erasure/segments.py",
        "dict.fromkeys(names, one.remains or one.found.problem is not None)",
        "dict.fromkeys(names, one.remains)",
        (f"{ARCHIVE}::test_a_segment_that_can_not_be_read_is_not_written_again_and_remains[lost]",),
    ),
    Mutant(
        "erased-messages-of-other-keys",
        "messages of other keys are overwritten",
        "rocketmq/archive/erasure.py",
        "        if self.request.keys:\n",
        "        if self.request.keys and not len(places):\n",
        (f"{ARCHIVE}::test_what_a_request_finds_is_told_by_the_real_key",),
    ),
    Mutant(
        "erased-on-spark-is-shown",
        "a bulk lookup shows what was erased",
        "spark/lookup/plan.py",
        "        if expired.tombstones and len(lookups):\n",
        "        if expired.tombstones and not len(lookups):\n",
        ("tests/spark/test_erase.py::test_answers_tables_and_audits",),
    ),
    Mutant(
        "erase-on-spark-sees-nothing",
        "executors find what objects hold, and the driver believes that nothing is left",
        "spark/build/erase.py",
        "return {name: held for found in",
        "return {name: type(held)() for found in",
        ("tests/spark/test_erase_now.py::test_what_is_left_is_what_is_left_without_spark[key]",),
    ),
    Mutant(
        "erase-with-two-moments",
        "messages that came while it worked are overwritten, and their entries stay",
        "service/erasure/erase.py",
        "sought = messages(stones[0].before_ms, schema.keyed)",
        "sought = messages(clock.now_ms() // 1000 * 1000 + 1000, schema.keyed)",
        (f"{ARCHIVE}::test_tombstones_and_overwritten_messages_are_of_one_moment",),
    ),
    Mutant(
        "erase-interrupted-leaves-an-object",
        "what an interrupt kept from being verified stays in the storage",
        "service/erasure/segments.py",
        "    except BaseException:\n        publication.resolve(log.state)  # no record can name it yet\n",
        "    except Exception:\n        publication.resolve(log.state)  # no record can name it yet\n",
        (f"{ARCHIVE}::test_an_interrupted_rewriting_takes_back_what_it_sent[get_suffix]",),
    ),
    Mutant(
        "interrupted-upload-left-behind",
        "what was sent before an interrupt stays in the storage",
        "service/lifecycle/publication.py",
        "        except BaseException:\n            upload.abandon()\n",
        "        except Exception:\n            upload.abandon()\n",
        (f"{ARCHIVE}::test_an_interrupted_rewriting_takes_back_what_it_sent[put]",),
    ),
    Mutant(
        "neighbours-of-the-erased-missing",
        "a reader at work calls messages missing whose segment was rewritten",
        "rocketmq/archive/messages.py",
        "if search.gone and search.found is None]",
        "if search.gone and search.found]",
        (f"{ARCHIVE}::test_a_reader_at_work_finds_neighbours_whose_segment_was_rewritten",),
    ),
    Mutant(
        "erase-hides-collisions",
        "the certificate does not say that entries of other keys went, too",
        "rocketmq/archive/erasure.py",
        "int((alike & ~sought).sum())",
        "int((alike & sought).sum() * 0)",
        (
            "tests/rocketmq/test_archive_erased.py::test_entries_of_keys_that_collide_are_counted_and_their_messages_stay",
        ),
    ),
)
