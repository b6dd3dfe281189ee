"""Defects of the codecs: hashes, time differences, chains, orders, directories."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

BLOOM = "tests/unit/format/test_bloom.py"
HASHING = "tests/unit/format/test_hashing.py"
UNSEALED = "tests/unit/format/test_unsealed.py"
COMPACTED = "tests/unit/format/test_compacted.py"

MUTANTS = (
    Mutant(
        "hash-min-value-scalar",
        "Integer.MIN_VALUE stays negative in a lookup's hash (RocketMQ 10462)",
        "format/hashing.py",
        "return 0 if value == 1 << 31 else value",
        "return value",
        (f"{HASHING}::test_min_value_becomes_zero",),
    ),
    Mutant(
        "hash-min-value-batch",
        "Integer.MIN_VALUE stays negative in a batch's hashes (RocketMQ 10462)",
        "format/hashing.py",
        "java[java == np.int32(-(2**31))] = 0",
        "pass",
        (f"{HASHING}::test_min_value_becomes_zero",),
    ),
    Mutant(
        "hash-min-value-stored",
        "a stored Integer.MIN_VALUE of RocketMQ's is not found",
        "format/hashing.py",
        "native[native == -(2**31)] = 0",
        "pass",
        (f"{UNSEALED}::test_stored_min_value_reads_as_zero",),
    ),
    Mutant(
        "hash-without-separator",
        "topic and key are hashed without what is between them",
        "format/hashing.py",
        'code_units([f"{topic}#" for topic in topics])',
        "code_units(list(topics))",
        (f"{HASHING}::test_many_short_strings_cross_blocks",),
    ),
    Mutant(
        "time-floored",
        "negative time differences are floored, not truncated as Java does",
        "format/unsealed.py",
        "np.sign(difference) * (np.abs(difference) // 1000)",
        "difference // 1000",
        (f"{UNSEALED}::test_time_differences_truncate_toward_zero_and_wrap",),
    ),
    Mutant(
        "chain-cut-between-batches",
        "a chain ends where a batch begins",
        "format/unsealed.py",
        "previous = heads[slots]",
        "previous = 0 * heads[slots]",
        (f"{UNSEALED}::test_batches_split_anywhere_equal_single_inserts",),
    ),
    Mutant(
        "chain-cut-within-a-batch",
        "entries of one slot in one batch are not chained to each other",
        "format/unsealed.py",
        "previous[rows[later]] = first + rows[later - 1]",
        "pass",
        (f"{UNSEALED}::test_batches_split_anywhere_equal_single_inserts",),
    ),
    Mutant(
        "chain-cut-at-limit",
        "a chain that is longer than the limit is cut there, as RocketMQ's are at 512",
        "format/unsealed.py",
        "return found if index <= 0 else None",
        "return found",
        (f"{UNSEALED}::test_walk_chain_gives_up_on_its_limit_and_on_chains_that_do_not_fall",),
    ),
    Mutant(
        "chains-of-a-batch-cut-at-limit",
        "batched lookups cut long chains instead of scanning",
        "service/files/unsealed.py",
        """# chains of hundreds, or ones that run backwards: the scan decides for every question
        if broken or np.any(index > 0):""",
        "if broken:  # chains of hundreds, or ones that run backwards: the scan decides for every question",
        ("tests/property/test_query_many.py::test_equals_single_queries_in_every_state[native]",),
    ),
    Mutant(
        "end-magic-late",
        "the end magic does not appear with the last free entry",
        "format/unsealed.py",
        "if self.free == 0 else",
        "if self.free < 0 else",
        (f"{UNSEALED}::test_end_magic_appears_with_the_last_free_entry",),
    ),
    Mutant(
        "insertion-order-wrong-way",
        "entries are numbered from the wrong end of their chunk, so newest first is none",
        "format/slot_order.py",
        "order[places] = stop - 1 - rows",
        "order[places] = max(stop - _CHUNK, 0) + rows",
        (f"{COMPACTED}::test_equals_lists_per_slot",),
    ),
    Mutant(
        "native-order-by-second",
        "native files hold the oldest second of a hash first",
        "format/slot_order.py",
        "~offsets, ~differences, keys[places]]",
        "~offsets, differences, keys[places]]",
        (f"{COMPACTED}::test_equals_lists_per_slot",),
    ),
    Mutant(
        "native-order-by-offset",
        "native files hold the smallest offset of a second first",
        "format/slot_order.py",
        "~offsets, ~differences, keys[places]]",
        "offsets, ~differences, keys[places]]",
        (f"{COMPACTED}::test_equals_lists_per_slot",),
    ),
    Mutant(
        "native-order-of-giants",
        "a giant slot holds the oldest second of a hash first",
        "format/slot_order.py",
        "(int(wide.max()) - wide)",
        "(wide - int(wide.min()))",
        (f"{COMPACTED}::test_equals_lists_per_slot",),
    ),
    Mutant(
        "true-interval-lost",
        "a compacted file's interval begins at its begin, so that late messages are not found (RocketMQ 10268)",
        "format/compacted.py",
        "begin_ms // 1000 + int(differences.min())",
        "begin_ms // 1000",
        ("tests/unit/service/test_buffer_flush_catalog.py::test_a_files_interval_grows_with_what_it_takes",),
    ),
    Mutant(
        "group-before",
        "a slot that begins a group is looked up in the one before",
        "format/trailer.py",
        '(self._first_slots, slot, "right")) - 1',
        '(self._first_slots, slot, "left")) - 1',
        (f"{COMPACTED}::test_runs_skip_right_blocks",),
    ),
    Mutant(
        "block-bound-exclusive",
        "a block whose newest second is the range's first one is not read",
        "format/trailer.py",
        '            & (blocks["second_max"] >= second_min)\n',
        '            & (blocks["second_max"] > second_min)\n',
        (f"{COMPACTED}::test_runs_skip_right_blocks",),
    ),
    Mutant(
        "batch-block-bound-exclusive",
        "batched lookups don't read a block whose oldest second is the range's last one",
        "format/trailer.py",
        '            first = int(group["first_block"])\n            blocks = self.blocks[first : first + '
        'int(group["blocks"])]\n'
        '            runs += _runs(blocks[(blocks["second_min"] <= second_max) & ',
        '            first = int(group["first_block"])\n            blocks = self.blocks[first : first + '
        'int(group["blocks"])]\n'
        '            runs += _runs(blocks[(blocks["second_min"] < second_max) & ',
        (
            "tests/unit/format/test_runs_of_many_slots.py::test_every_match_is_read_once_and_blocks_are_left_out_by_time",
        ),
    ),
    Mutant(
        "slots-from-configuration",
        "a foreign file's slots are not counted from the file",
        "format/compacted.py",
        "slots, rest = divmod(position - HEADER_SIZE, SLOT_SIZE)",
        "slots, rest = 5_000_000, 0",
        (f"{COMPACTED}::test_bare_slot_items",),
    ),
    Mutant(
        "filter-salts-swapped",
        "two words of a filter's blocks have each other's salt",
        "format/bloom.py",
        "SALTS = (0x47B6137B, 0x44974D91,",
        "SALTS = (0x44974D91, 0x47B6137B,",
        (f"{BLOOM}::test_whole_filters_are_parquets",),
    ),
    Mutant(
        "filter-block-by-remainder",
        "vectors take a filter's block by remainder, scalars as Parquet does",
        "format/bloom.py",
        "((hashes >> np.uint64(32)) * np.uint64(blocks) >> np.uint64(32)).astype(np.int64)",
        "(hashes % np.uint64(blocks)).astype(np.int64)",
        (f"{BLOOM}::test_nothing_is_denied_and_scalars_agree", f"{BLOOM}::test_large_filters_are_parquets"),
    ),
    Mutant(
        "filter-first-of-a-run-lost",
        "the least hash of a chunk is lost",
        "format/bloom.py",
        "    new[:1] = True\n",
        "    new[:1] = False\n",
        (f"{BLOOM}::test_whole_filters_are_parquets",),
    ),
    Mutant(
        "filter-sized-by-repeats",
        "a filter's size follows from the entries, not from the distinct keys",
        "format/bloom.py",
        "return hashes if new.all() else hashes[new]",
        "return hashes",
        (f"{BLOOM}::test_whole_filters_are_parquets",),
    ),
    Mutant(
        "filter-first-bits-only",
        "hashes with the same first bits are left in the order in which they came",
        "format/bloom.py",
        '            part.sort(kind="stable")  # which merges the runs that it finds\n',
        "",
        (f"{BLOOM}::test_repeats_among_hashes_that_begin_alike",),
    ),
    Mutant(
        "filter-any-word",
        "one bit of a key is enough for a block to hold it",
        "format/bloom.py",
        "((words & masks) == masks).all(axis=1)",
        "((words & masks) == masks).any(axis=1)",
        (f"{BLOOM}::test_false_positives",),
    ),
    Mutant(
        "filter-of-the-stored-hash",
        "a stored hash of -2147483648 is held under a number that no lookup asks for",
        "format/bloom.py",
        "normal_hashes(key_hash).astype(np.uint64)",
        "key_hash.astype(np.int64).astype(np.uint64)",
        (f"{BLOOM}::test_a_hash_that_stayed_negative_is_held_as_0",),
    ),
    Mutant(
        "filter-without-fingerprints",
        "a file's filter holds key hashes alone, and lookups ask for hash and fingerprint",
        "format/compacted.py",
        'items["fingerprint"] if schema.keyed else None',
        "None",
        (f"{BLOOM}::test_compacted_files_hold_the_filter_of_their_items",),
    ),
)
