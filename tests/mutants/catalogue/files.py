"""Defects of files as a log: rows lost, doubled, at the wrong place, or shown though their file was changed."""

from tests.mutants.mutant import parsed

MUTANTS = parsed(r"""
row-blocks-unchecked: bytes of a changed text are shown as the row
  in FileRows._text
  - if crc32(block) != sums[number]:
  + if crc32(block) is None:
  tests/unit/cli/test_linked_files.py::test_a_changed_or_deleted_file_is_named_and_its_bytes_are_never_shown
row-keys-unchecked: a row counts as one of the key without a look at it
  in FileRows._carries
  - return False
  + return True
  tests/unit/cli/test_linked_files.py::test_a_row_that_does_not_carry_the_key_is_dropped
segment-read-from-its-start: a run that was killed puts rows again that are durable
  in FileLinker._read
  - reading.batches(max(offset, segment.start) - shift)
  + reading.batches(segment.start - shift + 1)
  tests/unit/cli/test_linked_files.py::test_a_run_that_is_killed_anywhere_loses_and_doubles_no_row[plain-0]
segments-not-continued: what an earlier run has not finished is left out
  in FileLinker._run_plan
  - self._resume(plan, rests)
  tests/unit/cli/test_linked_files.py::test_a_run_that_is_killed_anywhere_loses_and_doubles_no_row[plain-0]
position-before-shorter-text: the position passes text that a killed run did not see, before the log knows it
  in FileLinker._read
  - if not may_get_more:
  + if True:
  tests/unit/cli/test_followed_files.py::test_lines_that_come_after_a_killed_run_has_read_to_the_end_are_indexed
gone-text-named-late: a text that is gone counts as read once later rows are put
  in FileLinker._run_plan
  - self._state(plan, rests, of_rests)
  tests/unit/cli/test_followed_files.py::test_a_text_that_is_away_while_a_run_goes_on_is_read_when_it_is_back
further-segment-lost: a packed text that is longer than its bound ends there
  in FileLinker._read
  - None if reading.is_whole or has_moved else reading.end
  + None
  tests/unit/cli/test_linked_files.py::test_a_run_that_is_killed_anywhere_loses_and_doubles_no_row[gzip-0]
grown-text-read-again: lines that were appended make a text a changed one
  in identity.py:_what_text_is
  - if not content.has_block(first):
  + if True:
  tests/unit/cli/test_linked_files.py::test_new_files_and_new_lines_are_indexed_once
known-by-size-alone: a file that was changed to the same size counts as known
  in SourceFile.is_same
  - self.size_bytes == size_bytes and self.stamp == stamp
  + self.size_bytes == size_bytes
  tests/unit/cli/test_linked_files.py::test_a_changed_or_deleted_file_is_named_and_its_bytes_are_never_shown
last-line-read-early: a last line without newline is indexed before it is whole
  in NdjsonFile.is_complete
  - return False
  + return True
  tests/unit/cli/test_linked_files.py::test_new_files_and_new_lines_are_indexed_once
change-while-read-untold: a file that is changed while it is read is not named
  in FileLinker._has_changed
  - now.place != listed.place or isinstance(what_is(now, known), Cut | Other)
  + False
  tests/unit/cli/test_linked_files.py::test_a_file_that_changes_while_it_is_read_is_named_and_read_again_by_the_next_run
topic-by-field-unnamed: a topic by a field of the rows is not known to have files
  in FileLinker._name_topics
  - self.index.describe_topics(here, self._document)
  tests/unit/cli/test_linked_files.py::test_the_topic_of_a_row_may_be_one_of_its_fields
rows-not-archived: rows are indexed, and their copies are lost
  in FileLinker._put_waiting
  - self._archiver.archive()
  + pass
  tests/unit/cli/test_linked_files.py::test_archived_rows_come_back_without_their_files_until_they_are_erased
rows-before-a-bad-one-lost: rows that wait for the archive are lost if a row ends the run
  in FileLinker._all
  - self._put_waiting()
  -             raise
  + raise
  tests/unit/cli/test_linked_files.py::test_the_archive_has_the_rows_before_one_that_ends_the_run
windows-not-erased: restart points keep the text of erased rows
  in restart.py:windows_to_erase
  - if not row["window"]
  + if row
  tests/unit/test_restart_points.py::test_a_row_of_a_packed_file_costs_the_text_behind_the_point_before_it
next-member-misplaced: the text behind a restarted member is read from its checksum on
  in RestartedText.read
  - len(self._inflater.unused_data) + _TRAILER_BYTES
  + len(self._inflater.unused_data)
  tests/unit/test_restart_points.py::test_the_text_from_each_point_on_is_that_of_the_file[isal-members]
frame-misplaced: a restart point of zstd is where the frame before it begins
  in _Frames._parsed
  - self.begin = self._taken
  + self.begin = self._taken if not self._taken else self.begin
  tests/unit/test_restart_points.py::test_frames_of_zstd_are_points_without_a_window[frames]
text-of-a-damaged-chunk: rows are taken from the text that damage in a file of xz has made
  in StreamedText._of_streams
  - is_whole=not self._is_xz or unpacker.eof
  + is_whole=True
  tests/unit/test_packed_streams.py::test_the_text_before_damage_is_read_and_no_other[xz-700]
dialect-of-the-header: a row of CSV is read again with the delimiter that its header suggests
  in forms.py:rows_of_form
  - CsvFile(*of_text, Dialect.of(segment_format))
  + CsvFile(*of_text)
  tests/unit/cli/test_linked_files.py::test_rows_of_csv_come_back_by_the_delimiter_and_quote_that_were_given
lines-of-blocks-not-counted: the number of a line is that in its block
  in FileRows._text
  - segment.lines[0] + sum(segment.lines[1][:first])
  + segment.lines[0]
  tests/unit/cli/test_linked_files.py::test_the_number_of_a_line_comes_back[linked]
queue-of-messages-unchecked: offsets of rows hide messages of the same topic
  in FileLinker._learn
  - check_queue(self.topic, batches)
  tests/unit/cli/test_linked_files.py::test_a_topic_with_other_entries_is_refused_because_offsets_would_hide_one_another
bad-row-unnamed: a bad row is left out without --skip-bad
  in FileLinker._put
  - if batch.bad and self.is_strict and not self.skip_bad:
  + if batch.bad and self.is_strict and self.skip_bad is None:
  tests/unit/cli/test_linked_files.py::test_a_bad_row_is_named_and_passed_over_and_is_no_finding_on_demand
minus-zero-as-zero: the key -0 becomes 0
  in TextFile.batch
  - sizes, end, may_be_minus_zero)
  + sizes, end)
  tests/unit/test_row_files.py::test_the_key_minus_zero_keeps_its_sign_among_integers
times-of-floats-truncated: a decimal time loses its milliseconds if rows are read together
  in RowMapping._ms_of_floats
  - numbers * 1000 // per
  + numbers // per * 1000
  tests/unit/test_row_files.py::test_numbers_are_the_same_times_together_and_one_by_one
record-cut-at-a-block: a record of CSV is cut where a block ends
  in TextBlocks._cut_bytes
  - return len(last) if self._text.is_cut(last) else 0
  + return 0
  tests/unit/test_row_files.py::test_records_of_several_lines_are_found_at_their_bytes
record-of-one-line: a record of CSV ends with its first line
  in CsvFile.split
  - not held and not (is_odd and self.is_cut(line))
  + not held
  tests/unit/test_row_files.py::test_records_of_several_lines_are_found_at_their_bytes
open-quote-takes-the-file: a quote that stays open takes all rows behind it
  in CsvFile.split
  - elif held_bytes > _MOST_QUOTED:
  + elif held_bytes < 0:
  tests/unit/test_row_files.py::test_a_quote_that_stays_open_takes_one_row
bad-row-of-another-line: a bad row has the number of another line
  in TextBlocks._block
  - self._lines += len(newlines)
  + self._lines += len(data)
  tests/unit/test_row_files.py::test_a_quote_that_stays_open_takes_one_row
arrow-rows-from-the-batch: Arrow rows before the position are read again
  in ArrowTable.read
  - skip = max(0, start - first)
  + skip = 0
  tests/unit/test_row_files.py::test_arrow_files_and_streams_are_read_from_any_row
arrow-batch-unbounded: a small Arrow file may take any memory
  in ArrowTable._batch
  - if total > _FILE_BATCH_BYTES:
  + if total < 0:
  tests/unit/test_row_files.py::test_a_batch_that_needs_too_much_memory_is_refused_before_it_is_decoded
damaged-times-untyped: a time that is no finite number ends the run with an untyped error
  in RowMapping.time_ms
  - (ValueError, OverflowError)
  + OverflowError
  tests/unit/test_row_files.py::test_a_float_that_is_no_number_is_a_bad_time
places-of-the-wrong-row: an answer gives the offset of an entry as its row
  in places.py:file_place
  - offset - segment.start + segment.position
  + offset
  tests/server/test_rows_of_files.py::test_entries_have_the_file_and_the_row_in_every_answer
places-lost-with-repeats: a page without repeated entries gives the places of all of them
  in rows.py:once
  - places = tuple([by_item[id(item)] for item in items])
  + places = page.places
  tests/server/test_rows_of_files.py::test_pages_without_repeated_entries_have_the_places_of_the_rest
offsets-given-twice: two jobs give the same offsets to different files
  in catalogs.py:check_behind
  - segment.start < max([*ends, state.expired.replaced.end(segment.store)])
  + segment.start < 0
  tests/unit/cli/test_linked_files.py::test_offsets_that_another_job_has_given_are_refused
piece-read-ahead-lost: a piece of an object that was read ahead is left out
  in ReadAhead.readinto
  - self._asked += length
  + self._asked += length + 1
  tests/unit/test_source_places.py::test_all_bytes_are_read_in_order_from_any_position[31457280]
cut-off-message-unseen: an Arrow file that is cut off is read up to there
  in ArrowTable._size
  - position + 8 + length + body > end
  + length < 0
  tests/unit/test_row_files.py::test_an_arrow_file_that_is_cut_off_is_damaged
copies-of-rows-that-are-none: the archive says that it has rows which a run without --archive indexed
  in ColumnArchiver.add
  - begin = max(begin, self.end(store))
  + begin = self.end(store)
  tests/unit/cli/test_linked_files.py::test_an_archive_that_lacks_rows_makes_no_short_index_in_silence
short-index-of-an-archive: an index of archived rows lacks those without a copy, and nothing says so
  in RowsLog.missing
  - if losses and not skip_missing:
  + if False:
  tests/unit/cli/test_linked_files.py::test_an_archive_that_lacks_rows_makes_no_short_index_in_silence
erased-messages-archived-again: a segment takes the place of the one from which a job has erased messages meanwhile
  in SegmentUploads._name.due
  - old is None or old.name == instead_of
  + True
  tests/unit/service/test_segment_archive.py::test_a_segment_that_a_job_replaced_meanwhile_stays_as_the_job_left_it
part-of-a-text-moves: a copy of the first rows counts as the file that has moved
  in _has_all_rows
  - return not verdict.is_part
  + return True
  tests/unit/cli/test_file_events.py::test_a_log_that_begins_as_the_one_before_takes_no_rows_of_that[False-ndjson-folder]
same-name-first: a file of the same name takes the rows of a log that another file has as a whole
  in _Decision._match
  - ((_has_all_rows, self._ways), (_has_first_rows, self._ways[::-1]))
  + ((_has_first_rows, self._ways),)
  tests/unit/cli/test_file_events.py::test_a_log_that_begins_as_the_one_before_takes_no_rows_of_that[False-ndjson-folder]
backup-indexed: a backup of a log that was edited since is indexed, too
  in is_earlier
  - 2 * len(before & after) > len(before)
  + False
  tests/unit/cli/test_file_events.py::test_a_backup_of_a_log_that_was_edited_since_is_no_further_log[ndjson-folder-app.log.bak]
restored-log-doubled: a log that is restored beside its copy is indexed again
  in _Decision._known_alike
  - may_have = crc == known.blocks[0].crc32
  + may_have = False
  tests/unit/cli/test_file_events.py::test_a_log_that_is_restored_beside_its_copy_counts_once[ndjson-folder]
first-reading-stays-lost: of a log that comes back only the last reading is found again
  in _Decision._renew
  - known.is_lost or last.uri != listed.uri
  + last.uri != listed.uri
  tests/unit/cli/test_file_events.py::test_a_log_of_several_readings_comes_back_as_a_whole[ndjson-folder]
replaced-table-known: a table counts as known whose rows were replaced
  in KnownFiles.add
  - self._replaced_tables += [other.place for other in known.segments]
  tests/unit/cli/test_file_events.py::test_a_table_that_gets_the_name_of_a_replaced_one_keeps_its_rows[parquet-folder]
checksums-of-later-rows: rows that a killed run has put get the checksums of others
  in FileLinker._read
  - not is_counted and self._has_changed(listed, segment)
  + False
  tests/unit/cli/test_file_events.py::test_what_is_written_while_a_later_run_ends_a_reading_is_read[arrow-folder]
copies-doubled: a second new reading of a file has rows again that only copies have
  in FileLinker._leave_out
  - self._copied[segment.start] = copied, names
  tests/unit/cli/test_file_events.py::test_rows_with_copies_count_once_after_further_edits_kills_and_from_the_archive_alone[ndjson-folder]
killed-replacement-waits: new rows of a reading that a killed run began wait for a further upload
  in FileLinker.run
  - if self._has_unpublished:
  + if False:
  tests/unit/cli/test_file_events.py::test_the_new_rows_of_a_killed_second_reading_are_answers_after_the_run_that_ends_it[parquet-folder]
edit-of-equal-length-unseen: a text of the same size is compared at its ends alone
  in identity.py:_what_text_is
  - size_bytes > reached >= end
  + size_bytes >= reached >= end
  tests/unit/cli/test_file_events.py::test_rows_behind_an_edit_are_read_anew_and_those_before_it_keep_their_places[0-ndjson-folder]
packed-log-without-points: a late row of a log that was packed costs all text before it
  in FileLinker._run_plan
  - self._point(*packed)
  tests/unit/cli/test_file_events.py::test_a_late_row_of_a_log_that_was_packed_is_read_from_a_restart_point[ndjson-folder]
unpublished-rows-shown: new rows of a file are answers beside the old ones
  in ReplacedRanges.hidden
  - tables = [self.retired, *(table for reading in self.readings for _, table in reading.new)]
  + tables = [self.retired]
  tests/unit/service/test_replaced.py::test_the_record_that_publishes_the_new_rows_retires_the_old_ones
retired-too-early: old rows of a file are hidden before the new ones are published
  in ReplacedRanges.published
  - if reading.end <= position]
  + if reading.end]
  tests/unit/service/test_replaced.py::test_the_record_that_publishes_the_new_rows_retires_the_old_ones
stopped-look-goes-on: a follower of files that is stopped reads all that they have
  in FileSource._put
  - if self._stop.is_set() and not self._is_ending:
  + if False:
  tests/unit/connectors/test_files.py::test_a_follower_that_is_stopped_ends_before_the_next_put_and_a_later_one_goes_on
files-away-are-level: the lag of files that are away is that of the last look
  in FileSource.batches
  - self._whole_ms = None
  + pass
  tests/unit/connectors/test_files.py::test_a_storage_that_is_away_is_trouble_until_it_is_back
look-that-failed-goes-on: a look after one that a full disk has ended does not read the log again
  in FileSource.batches
  - if self._is_interrupted:
  + if False:
  tests/unit/connectors/test_files.py::test_a_look_that_a_full_disk_has_ended_is_repeated
""")
