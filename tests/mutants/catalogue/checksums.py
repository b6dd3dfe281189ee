"""Defects of checks: CRCs, sizes, names and sums that the code no longer compares."""

from tests.mutants.mutant import parsed

MUTANTS = parsed(r"""
entries-crc-skipped: the CRC32 of entries is not checked
  in verified_entries
  - problem, batch.crc32, crc, offset=start
  + problem, crc, crc, offset=start
  tests/faults/test_damage.py::test_an_entry_that_rots_while_the_writer_runs_is_not_compacted
slot-group-crc-skipped: the CRC32 of slot groups is not checked
  in check_run
  - if (actual := crc32(piece)) != run.crc32:
  + if (actual := crc32(piece)) is None:
  tests/golden/test_faults_of_rocketmq.py::test_an_unreadable_object_is_no_short_answer
tail-crc-skipped: the CRC32 of a trailer's tail is not checked
  in Tail.decode
  - if actual != crc:
  + if actual is None:
  tests/unit/format/test_trailer.py::test_every_flipped_bit_is_noticed
directory-crc-skipped: the CRC32 of a directory is not checked
  in parse_trailer
  - if (actual := crc32(part)) != crc:
  + if (actual := crc32(part)) != crc and name != "directory":
  tests/unit/format/test_trailer.py::test_every_flipped_bit_is_noticed
directory-unchecked: a directory is accepted that does not cover each item once
  in parse_trailer
  - trailer.directory.check(trailer.metadata, tail.position, file)
  tests/hostile/test_bytes_of_wrong_meaning.py::test_lookups[overlapping]
journal-of-another-file: a journal is accepted that names another file than its own name does
  in parse_journal
  - file_id not in (None, journal.file_id)
  + file_id == ()
  tests/hostile/test_bytes_of_wrong_meaning.py::test_a_journal_that_names_another_file_leaves_that_one_alone
metadata-crc-skipped: the CRC32 of metadata is not checked
  in parse_trailer
  - if (actual := crc32(part)) != crc:
  + if (actual := crc32(part)) != crc and name != "metadata":
  tests/unit/format/test_trailer.py::test_every_flipped_bit_is_noticed
items-that-the-filter-denies: verify accepts a filter that excludes items of the file
  in _FileCheck._sound_runs
  - if denied:
  + if denied < 0:
  tests/unit/format/test_verify.py::test_every_bit_of_the_filter_counts
tables-crc-skipped: a compacted file with a damaged header or slot table is published
  in verify_tables
  - does not match its CRC32", expected, computed, offset=start)
  + does not match its CRC32", computed, computed, offset=start)
  tests/faults/test_damage.py::test_a_compacted_file_with_a_damaged_table_is_not_published[83-rocketmq-False]
items-unverified-before-upload: a compacted file with damaged items is published
  in Lifecycle._upload
  - verify_tables(file)
  - verify_runs(file)
  + verify_tables(file)
  tests/faults/test_damage.py::test_a_compacted_file_with_a_damaged_table_is_not_published
journal-crc-skipped: the CRC32 of journal records is not checked
  in _payload_at
  - == crc else None
  + is not None else None
  tests/unit/format/test_journal.py::test_every_flipped_bit
journal-record-lost: a journal that lacks a record in the middle is accepted
  in _apply
  - batch.first != journal.count + 1 or
  tests/unit/format/test_journal.py::test_a_lost_record_is_noticed
journal-damage-taken-for-crash: a damaged record before a whole one counts as a torn last write
  in _with_records
  - raise CorruptFile(file, "damaged record before a whole one", offset=start + position)
  + break
  tests/unit/format/test_journal.py::test_damaged_middle_names_where
log-crc-skipped: the CRC32 of log records is not checked
  in decode_document
  - if not mark or tail != expected:
  + if not mark:
  tests/faults/test_damaged_log.py::test_a_flipped_bit_anywhere_in_a_record_is_found
log-record-lost: a log with a hole is read as a whole one
  in StorageLog._listed_after
  - "the log has a hole before this record", expected, number_of(info.name))
  + "the log has a hole before this record", expected, expected)
  tests/unit/service/test_checkpoints.py::test_a_record_that_is_lost_is_found_by_whoever_reads_on_or_writes
log-number-unchecked: a record under another number is accepted
  in LogReplay.add
  - now.number + 1, record.number
  + record.number, record.number
  tests/faults/test_damaged_log.py::test_records_that_contradict_the_state_are_damage
object-of-another-file: an object is accepted that is not the file that the log names
  in verified_trailer
  - stated = (meta.file_id, meta.count,
  + stated = (stored.file_id, meta.count,
  tests/unit/service/cold/test_damaged_objects.py::test_objects_that_changed_places_are_named[native]
checkpoint-number-unchecked: a checkpoint under another number is accepted
  in Checkpoints.states
  - "the number differs from the checkpoint name", newest.number, state.number
  + "the number differs from the checkpoint name", newest.number, newest.number
  tests/unit/service/test_checkpoints.py::test_a_damaged_checkpoint_is_not_one_of_the_two
s3-range-unchecked: a read returns another range than the requested one
  in Boto3Reads._taken
  - if (int(sent[1]), int(sent[2]) + 1) != right or size not in (None, right[1] - first):
  + if size not in (None, right[1] - first):
  tests/storage/test_s3_answers.py::test_a_range_that_is_not_what_was_asked_is_never_returned
suffix-of-two-versions: a read of an object's end takes its size from one version and its bytes from another
  in BucketStorage.get_suffix
  - if size_now == size:
  + if True:
  tests/storage/test_s3_answers.py::test_a_suffix_is_of_one_version
s3-body-of-any-length: a body that is longer than its range is accepted
  in BucketStorage._get
  - if len(data) != end - start:
  + if len(data) < end - start:
  tests/storage/test_s3_answers.py::test_a_range_that_is_not_what_was_asked_is_never_returned
range-of-any-length: a range longer than the requested one is accepted
  in ColdPath._get
  - if len(data) != length:
  + if len(data) < length:
  tests/unit/service/cold/test_damaged_objects.py::test_a_range_always_answered_wrongly_is_corrupt[native-long]
cache-entry-unchecked: the CRC32 of entries of the local cache is not checked
  in CacheFolder.read
  - if self._crc32(name, kind, data) != crc32:
  + if not data:
  tests/unit/service/cold/test_local_cache.py::test_no_flipped_byte_of_an_entry_is_believed[trailer]
cache-entry-of-another-object: a cache entry copied to another object's name is accepted
  in CacheFolder._crc32
  - zlib.crc32(f"{self._index_id}\n{name}\n{kind}".encode())
  + 0
  tests/unit/service/cold/test_local_cache.py::test_what_is_not_this_entry_is_fetched_again[other object-filter]
shard-order-unchecked: verify does not compare the border of two blocks
  in _FileCheck._unpacked
  - before, self._before = self._before, items[-1:]
  + before = self._before
  tests/unit/format/test_verify.py::test_order_across_blocks[giant shard]
plain-runs-of-native: a native file without packed runs, which no writer makes, is read
  in Metadata.decode
  - if "packed" not in metadata.more and
  + if metadata.layout.preset is None and
  tests/unit/format/test_trailer.py::test_plain_runs_are_refused_unless_rocketmq_must_read_them[file]
  tests/unit/format/test_trailer.py::test_plain_runs_are_refused_unless_rocketmq_must_read_them[shard]
topics-without-names: a file is read whose entries have a topic id without a name
  in _metadata
  - if nameless :=
  + if nameless := set() and
  tests/unit/format/test_verify.py::test_each_contradiction_is_named_by_its_part
shard-sum-unchecked: verify does not check a shard's checksum
  in _FileCheck.runs
  - meta.more.get("checksum", sum_found)),
  + sum_found),
  tests/unit/format/test_verify.py::test_each_contradiction_is_named_by_its_part
sum-without-times: entries with other times have the checksum of the right ones
  in entry_hashes
  - if name != "time_diff_s"), seconds)
  + if name != "time_diff_s"), np.zeros(len(seconds), np.int64))
  tests/unit/format/test_compacted.py::test_checksums_tell_multisets_apart
merge-believes-its-sum: a merge that wrote other entries than it read is published
  in Rewrite.check_proof
  - "wrote other entries than it read", read_sum % 2**64
  + "wrote other entries than it read", written_sum % 2**64
  tests/unit/service/merge/test_readers_and_writers.py::test_results_that_do_not_add_up_are_not_published
copy-of-damage: a damaged object is copied
  in service/jobs/copying.py:_check
  - defects_of(storage, named, once):
  + defects_of(storage, named, once)[:0]:
  tests/unit/service/copies/test_copies.py::test_nothing_damaged_is_copied_and_the_name_is_told
copy-of-what-was-not-checked: a copy reads a window twice, and sends other bytes than it checked
  in _check.once
  - CorruptFile.unless_equal(named.name, _DIFFER, sums[start], crc32)
  + assert crc32 is not None
  tests/unit/service/copies/test_copies.py::test_what_is_sent_is_what_was_checked
probe-believes-the-answer: a server that refuses a put but stores it passes the probe
  in _twice_put
  - if is_refused and stored == _BODY:
  + if is_refused and stored:
  tests/unit/storage/test_probe.py::test_the_probe_refuses_a_server_that_refuses_and_yet_stores
""")
