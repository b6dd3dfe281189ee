"""Defects of the room for filters: what is fetched though it doesn't fit."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

ROOM = "tests/unit/service/cold/test_filters_without_room.py"

MUTANTS = (
    Mutant(
        "filters-in-use-thrown-out", "a filter throws out others that are of use as much",
        "service/cold/caches.py", "return self._size_bytes + size_bytes <= self._max_bytes", "return True",
        (f"{ROOM}::test_those_that_fit_stay_and_the_rest_is_read[memory]",),
    ),
    Mutant(
        "cached-filters-in-use-thrown-out", "a filter takes the room of others on the disk that are of use as much",
        "service/cold/disk_cache.py", "return self._size_bytes + size_bytes <= self.max_bytes * _SLACK", "return True",
        (f"{ROOM}::test_those_that_fit_stay_and_the_rest_is_read[cache_dir]",),
    ),
    Mutant(
        "filters-again-and-again", "misses that paid for one filter pay for the next one too",
        "service/cold/caches.py", "                self._missed_bytes -= length\n", "",
        (f"{ROOM}::test_filters_in_place_of_others_cost_no_more_bytes_than_misses[memory]",),
    ),
    Mutant(
        "room-promised-twice", "filters that are fetched side by side are promised the same room",
        "service/cold/caches.py", "has_room(length + sum(self._fetching.values()))", "has_room(length)",
        (f"{ROOM}::test_room_is_counted_once_while_filters_are_being_fetched",),
    ),
    Mutant(
        "room-never-let-go", "a filter that can't be had holds its room for good",
        "service/cold/path.py", "            self.filters.end_fetch(stored)\n", "            pass\n",
        (f"{ROOM}::test_a_filter_that_can_not_be_had_holds_no_room",),
    ),
    Mutant(
        "noted-for-good", "reads in vain of objects that are gone are counted for ever",
        "service/files/window_table.py", "    cold.forget_unnamed(state.objects)\n", "",
        ("tests/unit/service/cold/test_objects_that_went.py::test_a_reader_notes_only_what_there_is[counted]",),
    ),
)  # fmt: skip
