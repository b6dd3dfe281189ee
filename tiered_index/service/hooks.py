"""Hooks of an embedded writer: functions of the program that the workers call when something has happened.

A worker calls them between its rounds, so no lock is held. An error of a hook is logged. Threads: the workers', one
call at a time for each hook.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

_log = logging.getLogger(__name__)
PositionHook = Callable[[str, int], object]
ProblemHook = Callable[[str], object]


@dataclass(eq=False)
class Hooks:
    """The hooks of one index.

    - `on_durable(source, position)`: the entries up to this position of a source are on the local disk.
    - `on_published(source, position)`: they are in the storage, too, where readers see them.
    - `on_problem(problem)`: `health` lists a problem that was not there before.
    """

    on_durable: PositionHook | None = None
    on_published: PositionHook | None = None
    on_problem: ProblemHook | None = None
    _durable: dict[str, int] = field(default_factory=dict)
    _published: dict[str, int] = field(default_factory=dict)
    _problems: set[str] = field(default_factory=set)

    def tell_durable(self, positions: Mapping[str, int]) -> None:
        """Tell the durable positions that have changed."""
        _tell_positions(self.on_durable, positions, self._durable)

    def tell_published(self, positions: Mapping[str, int]) -> None:
        """Tell the positions in the storage's log that have changed."""
        _tell_positions(self.on_published, positions, self._published)

    def tell_problems(self, errors: Callable[[], Iterable[tuple[str, object]]]) -> None:
        """Tell the problems that are new, by the names of their origins."""
        if self.on_problem is None:
            return
        problems = {name: f"{name}: {error}" for name, error in errors()}
        for name in problems.keys() - self._problems:
            _call(self.on_problem, problems[name])
        self._problems = {*problems}


def _tell_positions(hook: PositionHook | None, positions: Mapping[str, int], known: dict[str, int]) -> None:
    if hook is None:
        return
    for source, position in positions.items():
        if known.get(source) != position:
            known[source] = position
            _call(hook, source, position)


def _call(hook: Callable[..., object], *arguments: object) -> None:
    try:
        hook(*arguments)
    except Exception:  # noqa: BLE001 - it is the program's, and the worker must go on
        _log.exception("a hook of the index failed: %r", hook)
