"""Defects of the room for filters: what is fetched though it doesn't fit."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

ROOM = "tests/unit/service/cold/test_filters_without_room.py"

MUTANTS = (
    Mutant(
        "filters-in-use-thrown-out", "a filter throws out others that are of use as much",
        "service/cold/memory_cache.py", "if needed <= 0 or when >= since:", "if needed <= 0:",
        (f"{ROOM}::test_those_that_fit_stay_and_the_rest_is_read[memory]",),
    ),
    Mutant(
        "cached-filters-in-use-thrown-out", "a filter takes the room of others on the disk that are of use as much",
        "service/cold/disk_cache.py", 'path, size_bytes, free_bytes, self._ages, since_s - _TOUCH_S', 'path, size_bytes, free_bytes, self._ages, time.time() + _TOUCH_S',
        (f"{ROOM}::test_those_that_fit_stay_and_the_rest_is_read[cache_dir]",),
    ),
    Mutant(
        "filters-again-and-again", "a filter that was thrown out is fetched as soon as the first time",
        "service/cold/filters.py", "again = min(max(0, self._fetched(name) - 1), _DOUBLINGS)", "again = 0",
        (f"{ROOM}::test_changing_lookups_fetch_a_filter_ever_more_rarely",),
    ),
    Mutant(
        "room-promised-twice", "filters that are fetched side by side are promised the same room",
        "service/cold/memory_cache.py", "sum(self._held.values()) + size_bytes - free_bytes", "size_bytes - free_bytes",
        (f"{ROOM}::test_room_is_held_while_filters_are_under_way",),
    ),
    Mutant(
        "room-never-let-go", "a filter that can't be had holds its room for good",
        "service/cold/path.py", "            self.filters.release(stored)\n", "            pass\n",
        (f"{ROOM}::test_a_filter_that_can_not_be_had_holds_no_room",),
    ),
    Mutant(
        "noted-for-good", "reads in vain of objects that are gone are counted for ever",
        "service/files/window_table.py", "    cold.forget_unnamed(state.objects)\n", "",
        ("tests/unit/service/cold/test_objects_that_went.py::test_a_reader_notes_only_what_there_is[counted]",),
    ),
)  # fmt: skip
