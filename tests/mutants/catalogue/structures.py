"""Defects of what lookups and writers share: the skip list and the catalogue."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

SKIPLIST = "tests/property/test_skiplist.py"
ORACLE = f"{SKIPLIST}::test_it_yields_what_a_sorted_list_yields"
CATALOG = "tests/unit/service/test_buffer_flush_catalog.py"

MUTANTS = (
    Mutant(
        "skiplist-begin-exclusive",
        "a handle that ends in the range's first second is not found",
        "service/catalog/skiplist.py",
        "begin <= node.end and",
        "begin < node.end and",
        (ORACLE,),
    ),
    Mutant(
        "skiplist-link-begin-exclusive",
        "a link is followed past a handle that ends in the range's first second",
        "service/catalog/skiplist.py",
        "while level > 0 and reach >= begin:",
        "while level > 0 and reach > begin:",
        (ORACLE,),
    ),
    Mutant(
        "skiplist-end-exclusive",
        "a handle that begins in the range's last second is not found",
        "service/catalog/skiplist.py",
        "following.begin > end:",
        "following.begin >= end:",
        (ORACLE,),
    ),
    Mutant(
        "skiplist-insert-reach",
        "links that pass over a new node don't learn of its end",
        "service/catalog/skiplist.py",
        "path[i].links[i] = (following, max(reach, end))",
        "path[i].links[i] = (following, reach)",
        (ORACLE,),
    ),
    Mutant(
        "skiplist-remove-reach",
        "links keep the end of a node that was removed",
        "service/catalog/skiplist.py",
        "            for i in range(_MAX_LEVEL):\n                self._measure(path[i], i)\n            self._count "
        "-= 1",
        "            self._count -= 1",
        (ORACLE,),
    ),
    Mutant(
        "skiplist-unlink-lowers-early",
        "an unlinked node's followers are out of reach for a moment",
        "service/catalog/skiplist.py",
        "(following, max(path[i].links[i][1], reach))",
        "(following, min(path[i].links[i][1], reach))",
        (f"{SKIPLIST}::test_a_scan_at_any_bytecode_of_a_change_misses_nothing",),
    ),
    Mutant(
        "skiplist-linked-before-its-links",
        "a new node leads nowhere while it is being linked",
        "service/catalog/skiplist.py",
        "                node.links[i] = path[i].links[i]  # its reach is too great for now, never too small\n"
        "            for i in range(level):\n"
        "                path[i].links[i] = (node, path[i].links[i][1])\n",
        "                before = path[i].links[i]\n"
        "                path[i].links[i] = (node, before[1])\n"
        "                node.links[i] = before\n",
        (f"{SKIPLIST}::test_a_scan_at_any_bytecode_of_a_change_misses_nothing",),
    ),
    Mutant(
        "catalog-reclaim-under-a-reader",
        "a file goes while a lookup that began before may need it",
        "service/catalog/catalog.py",
        "min(list(self._readers.values()), default=self._generation + 1)",
        "self._generation + 1",
        (f"{CATALOG}::test_what_a_running_query_may_need_is_kept",),
    ),
    Mutant(
        "catalog-remove-before-insert",
        "for a moment neither a file nor its successor is in the list",
        "service/catalog/catalog.py",
        "        self._nodes[handle.file_id] = self._list.insert(begin, max(begin, handle.second_max), handle)\n"
        "        if old is not None:\n            self._list.remove(old)\n",
        "        if old is not None:\n            self._list.remove(old)\n"
        "        self._nodes[handle.file_id] = self._list.insert(begin, max(begin, handle.second_max), handle)\n",
        (f"{CATALOG}::test_a_file_is_visible_at_every_moment_of_a_change[put]",),
    ),
    Mutant(
        "catalog-end-not-extended",
        "a file's interval does not grow with later entries",
        "service/catalog/catalog.py",
        "max(old.end, handle.second_max)",
        "old.end",
        (f"{CATALOG}::test_a_files_interval_grows_with_what_it_takes",),
    ),
    Mutant(
        "catalog-begin-not-extended",
        "a file's interval does not grow with late entries",
        "service/catalog/catalog.py",
        "begin, end = min(old.begin, handle.second_min), ",
        "begin, end = old.begin, ",
        (f"{CATALOG}::test_a_files_interval_grows_with_what_it_takes",),
    ),
)
