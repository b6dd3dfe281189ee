"""`TimeRangeSkipList`: handles keyed by time range, newest first, searched without a lock.

A node has an inclusive interval [begin, end] of epoch seconds and a value. Nodes are ordered by begin descending, then
by insertion. Each link has the greatest `end` of the nodes that it skips, and of its target. So a search follows the
links that lead to an overlapping node: O(log n + hits).

Invariants
- A link is an immutable pair (target, greatest end), replaced as a whole, so readers get a consistent pair. The end is
  never too small. An insertion raises it before it links the node, and an extension before it extends the node. A
  removal lowers it after it has unlinked the node. So a reader may visit too many nodes, but never too few.
- A removed node keeps its links, so a reader on it continues in the list.
- A node that is replaced or removed stays in the list until no snapshot has it (see `catalog`).

Threads: one at a time calls `insert`, `extend` and `remove` (the catalog's lock); any calls `overlapping`, at any time.
Sources: Pugh, "Skip lists: a probabilistic alternative to balanced trees" (1990); Hanson and Johnson, "The interval
skip list: a data structure for finding all intervals that overlap a point" (1991).
"""

from __future__ import annotations

import itertools
import random
from typing import Generic, TypeVar

V = TypeVar("V")
_MAX_LEVEL = 24
_NONE = -(2**62)
NEVER = 2**62
"""A generation after all others."""


class Node(Generic[V]):
    """One value in the list. Nodes are compared by identity.

    `since` and `until` are the caller's: the first generation that has the node, and the first one after it.
    """

    __slots__ = ("begin", "end", "key", "links", "since", "until", "value")

    def __init__(self, key: tuple[int, int], begin: int, end: int, value: V | None, level: int, since: int) -> None:
        self.since, self.until = since, NEVER
        self.key = key
        self.begin = begin
        self.end = end
        self.value = value
        # links[i]: (following, greatest end of the nodes in (self, following])
        self.links: list[tuple[Node[V] | None, int]] = [(None, _NONE)] * level


class TimeRangeSkipList(Generic[V]):
    """A skip list of time ranges (see the module). `rng` decides the levels; tests give a seeded one."""

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()
        self._ages = itertools.count()
        self._head: Node[V] = Node((_NONE, -1), 0, _NONE, None, _MAX_LEVEL, 0)
        # the highest level that ever had a node, raised before the node is linked; an old value costs more steps
        self._height = 1

    def insert(self, begin: int, end: int, value: V, since: int = 0) -> Node[V]:
        """Add `value` with the inclusive interval [begin, end]. Return its node. Raises `ValueError` if begin > end.

        `since`: see `Node`.
        """
        if begin > end:
            raise ValueError(f"interval ends before it begins: [{begin}, {end}]")
        level = 1
        while level < _MAX_LEVEL and self._rng.random() < 0.25:
            level += 1
        node: Node[V] = Node((-begin, next(self._ages)), begin, end, value, level, since)
        self._height = max(self._height, level)
        path = self._path(node.key)
        for i in range(_MAX_LEVEL):
            following, reach = path[i].links[i]
            path[i].links[i] = (following, max(reach, end))
        for i in range(level):
            node.links[i] = path[i].links[i]  # its reach may be too great for now, but never too small
        for i in range(level):
            path[i].links[i] = (node, path[i].links[i][1])
        for i in range(level):
            self._measure(path[i], i)
            self._measure(node, i)
        return node

    def extend(self, node: Node[V], end: int) -> None:
        """Raise the end of the interval of `node`, which is in the list, to `end`."""
        path = self._path(node.key)
        # first the links that skip the node or end at it
        for i in range(_MAX_LEVEL):
            following, reach = path[i].links[i]
            path[i].links[i] = (following, max(reach, end))
        node.end = max(node.end, end)

    def remove(self, node: Node[V]) -> None:
        """Remove `node`. Raises `KeyError` if it is not in the list."""
        path = self._path(node.key)
        if path[0].links[0][0] is not node:
            raise KeyError("the node is not in the list")
        for i in reversed(range(len(node.links))):
            following, reach = node.links[i]
            path[i].links[i] = (following, max(path[i].links[i][1], reach))
        for i in range(_MAX_LEVEL):
            self._measure(path[i], i)

    def overlapping(self, begin: int, end: int) -> list[Node[V]]:
        """Return the nodes whose interval overlaps the inclusive range [begin, end], greatest begin first."""
        nodes: list[Node[V]] = []
        node = self._head
        for i in range(self._height - 1, -1, -1):
            # skip the nodes that begin after `end`, which are first
            while (following := node.links[i][0]) is not None and following.begin > end:
                node = following
        height = self._height
        while True:
            # follow the longest link that skips only nodes that end before `begin`
            links = node.links
            level = len(links) - 1
            if level >= height:
                level = height - 1
            following, reach = links[level]
            while level > 0 and reach >= begin:
                level -= 1
                following, reach = links[level]
            if following is None:
                return nodes
            node = following
            if reach >= begin and begin <= node.end and node.begin <= end:
                nodes.append(node)

    def _path(self, key: tuple[int, int]) -> list[Node[V]]:
        """Return the last node before `key`, for each level."""
        path = [self._head] * _MAX_LEVEL
        node = self._head
        for i in reversed(range(_MAX_LEVEL)):
            while (following := node.links[i][0]) is not None and following.key < key:
                node = following
            path[i] = node
        return path

    def _measure(self, node: Node[V], level: int) -> None:
        """Compute the reach of one link from the level below."""
        target, _ = node.links[level]
        if level == 0:
            node.links[0] = (target, target.end if target is not None else _NONE)
            return
        greatest = _NONE
        step: Node[V] | None = node
        while step is not None and step is not target:
            step, reach = step.links[level - 1]
            greatest = max(greatest, reach)
        node.links[level] = (target, greatest)
