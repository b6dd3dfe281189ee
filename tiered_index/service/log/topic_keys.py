"""Positions that say by which rules the messages of a topic have keys, and from where on. Pure. SPEC.md section 9.

A rule finds keys in a message: by the path of a field, or the name of a header. A source may add a rule to a
topic that it has read already. Then it reads the earlier messages again, for this rule alone: a *pass*. `SCOPE` is a
topic of a source, and `LOG` one of its logs, whose offsets passes use. Rules are written with escapes, as in URIs.

- ``topic-key:SCOPE/RULE``: odd if new messages have keys by the rule, even if not any more. It counts both.
- ``topic-key-begin:LOG/RULE#N``: the first offset of the N-th pass (from 0); 0 if there is none.
- ``topic-key-end:LOG/RULE#N``: the offset after its last one. From there on new messages have keys by the rule.
- ``topic-key-read:LOG/RULE#N``: the offset before which the pass has put all entries; its begin if there is none.

A pass leaves out messages that can't be read now, such as those of a file that is away: they are a pass of their own,
whose number is ``N.K``. It counts as far as the N-th pass has been there.

They become durable as all positions do: the last one together with the entries of the pass.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple
from urllib.parse import quote, unquote

from msgspec import structs

from tiered_index.base.units import MAX_TIMESTAMP_MS
from tiered_index.format.names import LINKED, topic_of_store
from tiered_index.service.log.records import LostObject, LostRange, RangeKind

TOPIC_KEYS = "topic-key"
"""The beginning of the names of all these positions."""
_KEY, _BEGIN, _END, _READ = (f"{TOPIC_KEYS}{what}:" for what in ("", "-begin", "-end", "-read"))
_OF_PASS = re.compile(r"(?P<log>.+)/(?P<rule>[^/#]+)#(?P<number>[0-9]+)(?:\.(?P<away>[0-9]+))?", re.DOTALL)


class KeyPass(NamedTuple):
    """One pass over the offsets [`begin`, `end`) of a log for one rule; `read` is the offset before which it is done.

    `number` counts the passes of the rule, from 0. `away` counts those for what this pass left out, from 0; None: it is
    none of them.
    """

    log: str
    rule: str
    number: int
    begin: int
    end: int
    read: int
    away: int | None = None

    @property
    def source(self) -> str:
        """The name of the position that the entries of the pass advance."""
        return _READ + _of_pass(self.log, self.rule, self.number, self.away)

    @property
    def is_done(self) -> bool:
        """Whether all messages have keys by the rule, or had."""
        return self.read >= self.end


def scope_of(log: str) -> str:
    """Return the scope of a log: the topic of a partition; a log of files is a scope of its own."""
    return log if log.startswith(LINKED) else log.rpartition("/")[0]


def _of_scope(scope: str, rule: str) -> str:
    return f"{scope}/{quote(rule, safe='')}"


def _of_pass(log: str, rule: str, number: int, away: int | None = None) -> str:
    return f"{_of_scope(log, rule)}#{number}{'' if away is None else f'.{away}'}"


def _counts(positions: Mapping[str, int], scope: str) -> dict[str, int]:
    """Return how often each rule of a scope was added or dropped."""
    return {rule: positions[_KEY + _of_scope(scope, rule)] for rule in rules_in(positions, scope)}


def rules_in(names: Iterable[str], scope: str) -> list[str]:
    """Return the rules by which messages of a scope have keys, or had, sorted, by the names of positions."""
    prefix = f"{_KEY}{scope}/"
    rules = (name.removeprefix(prefix) for name in names if name.startswith(prefix))
    return sorted(unquote(rule) for rule in rules if "/" not in rule)


def rule_positions(positions: Mapping[str, int], scope: str) -> dict[str, int]:
    """Return the positions that say which rules a scope has."""
    return {_KEY + _of_scope(scope, rule): count for rule, count in _counts(positions, scope).items()}


def rules_of(positions: Mapping[str, int], scope: str) -> list[str]:
    """Return the rules by which new messages of a scope have keys, sorted."""
    return sorted(rule for rule, count in _counts(positions, scope).items() if count % 2)


def positions_of(positions: Mapping[str, int], log: str) -> dict[str, int]:
    """Return the positions of the rules of a log and of its passes."""
    begins = tuple(f"{kind}{log}/" for kind in (_BEGIN, _END, _READ))
    scope = f"{_KEY}{scope_of(log)}/"
    return {
        name: at
        for name, at in positions.items()
        if name.startswith(begins) or (name.startswith(scope) and "/" not in name[len(scope) :])
    }


def added_positions(positions: Mapping[str, int], scope: str, rule: str, ends: Mapping[str, int]) -> dict[str, int]:
    """Return the positions that add a rule to a scope, in the order in which they are to be put.

    `ends` has the offset of each log from which on its messages get keys by the rule.
    """
    count = _counts(positions, scope).get(rule, 0)
    assert not count % 2, "it was added before"
    added = dict[str, int]()
    for log, end in ends.items():
        name = _of_pass(log, rule, count // 2)
        if end > positions.get(_BEGIN + name, 0):
            added[_END + name] = end
    return added | {_KEY + _of_scope(scope, rule): count + 1}


def dropped_positions(positions: Mapping[str, int], scope: str, rule: str, ends: Mapping[str, int]) -> dict[str, int]:
    """Return the positions that drop a rule of a scope, in the order in which they are to be put.

    `ends` has the offset of each log from which on its messages get no keys by the rule.
    """
    count = _counts(positions, scope)[rule]
    assert count % 2, "it was dropped before"
    begins = {_BEGIN + _of_pass(log, rule, count // 2 + 1): end for log, end in ends.items() if end}
    return begins | {_KEY + _of_scope(scope, rule): count + 1}


def kept_positions(positions: Mapping[str, int], log: str, rule: str, begin: int, end: int) -> dict[str, int]:
    """Return the positions by which messages at offsets [`begin`, `end`) have keys by a rule that was dropped.

    They are in the order in which they are to be put. No message is at `begin` or behind it.
    """
    count = _counts(positions, scope_of(log))[rule]
    assert not count % 2, "it was not dropped"
    dropped = _BEGIN + _of_pass(log, rule, count // 2)
    if positions.get(dropped) == begin:
        return {dropped: end}
    added = {_END + _of_pass(log, rule, count // 2): begin, _BEGIN + _of_pass(log, rule, count // 2 + 1): end}
    return added | {_KEY + _of_scope(scope_of(log), rule): count + 2}


def away_positions(positions: Mapping[str, int], key_pass: KeyPass, begin: int, end: int) -> dict[str, int]:
    """Return the positions by which a pass leaves out messages at offsets [`begin`, `end`), in the order to put them.

    Put them before the position of the pass itself.
    """
    of_pass = key_pass.log, key_pass.rule, key_pass.number
    # a killed run may have put a begin alone
    away = sum(name.startswith(f"{_BEGIN}{_of_pass(*of_pass)}.") for name in positions)
    name = _of_pass(*of_pass, away)
    return {_BEGIN + name: begin, _END + name: end}


def added_end(positions: Mapping[str, int], log: str) -> int:
    """Return the offset before which messages of a log may have keys that were added to them later; 0: none has.

    What a segment says of its messages with keys is not known there.
    """
    prefix = f"{_END}{log}/"
    return max((at for name, at in positions.items() if name.startswith(prefix)), default=0)


def named_end(positions: Mapping[str, int], log: str) -> int:
    """Return the offset before which positions say what keys messages of a log have, also of some that may come."""
    begins = f"{_BEGIN}{log}/", f"{_END}{log}/"
    return max((at for name, at in positions.items() if name.startswith(begins)), default=0)


class TopicKeys:
    """The rules of one log, by the positions of an index."""

    def __init__(self, positions: Mapping[str, int], log: str) -> None:
        self.log = log
        self._counts = _counts(positions, scope_of(log))
        self._passes = {
            rule: [self._pass(positions, rule, number) for number in range((count + 1) // 2)]
            for rule, count in self._counts.items()
        }
        self._left_out = dict[str, list[KeyPass]]()
        for key_pass in _passes_in(positions, log):
            if key_pass.away is not None:
                self._left_out.setdefault(key_pass.rule, []).append(key_pass)
        # where the messages of a dropped rule end
        self._drops = {
            rule: [positions.get(_BEGIN + _of_pass(log, rule, number), 0) for number in range(1, count // 2 + 1)]
            for rule, count in self._counts.items()
        }

    def _pass(self, positions: Mapping[str, int], rule: str, number: int) -> KeyPass:
        name = _of_pass(self.log, rule, number)
        begin = positions.get(_BEGIN + name, 0)
        end, read = positions.get(_END + name, begin), positions.get(_READ + name, begin)
        return KeyPass(self.log, rule, number, begin, end, read)

    @property
    def active(self) -> list[str]:
        """The rules by which new messages have keys, sorted."""
        return sorted(rule for rule, count in self._counts.items() if count % 2)

    @property
    def passes(self) -> list[KeyPass]:
        """The passes of active rules that are not done, by their offsets."""
        left = [key_pass for rule in self.active for key_pass in self._passes[rule] if not key_pass.is_done]
        return sorted(left, key=lambda key_pass: (key_pass.read, key_pass.rule, key_pass.number))

    def left_out_by(self, key_pass: KeyPass) -> list[KeyPass]:
        """Return the passes for what a pass has left out, also those that are done."""
        return [other for other in self._left_out.get(key_pass.rule, []) if other.number == key_pass.number]

    @property
    def left_out(self) -> list[KeyPass]:
        """The passes of active rules for what others left out, which are not done, by their offsets."""
        left = (other for rule in self.active for other in self._left_out.get(rule, []) if not other.is_done)
        return sorted(left, key=lambda key_pass: (key_pass.read, key_pass.rule, key_pass.number))

    def ranges(self, rule: str) -> Iterator[tuple[int, int | None]]:
        """Yield the offsets [begin, end) of messages that have their keys by a rule; end None: all later ones."""
        for key_pass, drop in zip(self._passes[rule], [*self._drops[rule], None], strict=False):
            begin, read = key_pass.begin, min(key_pass.read, key_pass.end)
            for left_out in sorted(self.left_out_by(key_pass), key=lambda left_out: left_out.read):
                if left_out.is_done:
                    continue
                if begin < left_out.read:
                    yield begin, min(left_out.read, read)
                begin = max(begin, left_out.end)
            if begin < read:
                yield begin, read
            if drop is None or key_pass.end < drop:
                yield key_pass.end, drop

    def holding(self, offset: int) -> list[str]:
        """Return the rules by which the message at an offset has its keys, sorted."""
        return [
            rule
            for rule in sorted(self._counts)
            if any(begin <= offset and (end is None or offset < end) for begin, end in self.ranges(rule))
        ]

    def dropped_in(self, spans: Collection[tuple[int, int]]) -> list[str]:
        """Return the dropped rules by which messages at offsets [start, end) of any of `spans` have keys, sorted."""
        return [
            rule
            for rule, count in sorted(self._counts.items())
            if not count % 2
            and any(
                begin < span_end and (end is None or start < end)
                for begin, end in self.ranges(rule)
                for start, span_end in spans
            )
        ]

    def next_change(self, offset: int) -> int | None:
        """Return the least offset behind one at which the rules that `holding` returns may be others; None: none."""
        ends = (at for rule in self._counts for bounds in self.ranges(rule) for at in bounds)
        return min((at for at in ends if at is not None and at > offset), default=None)


def _passes_in(positions: Mapping[str, int], log: str = "") -> Iterator[KeyPass]:
    """Yield the passes that have an end: of one log, or of all."""
    begin = f"{_END}{log}/" if log else _END
    for name, end in positions.items():
        if name.startswith(begin) and (match := _OF_PASS.fullmatch(name, len(_END))) is not None:
            away = None if match["away"] is None else int(match["away"])
            of_pass = match["log"], unquote(match["rule"]), int(match["number"])
            first = positions.get(_BEGIN + _of_pass(*of_pass, away), 0)
            yield KeyPass(*of_pass, first, end, positions.get(_READ + _of_pass(*of_pass, away), first), away)


def unread_in(positions: Mapping[str, int]) -> dict[str, LostObject]:
    """Return what answers lack because passes are not done, by name; `positions` are all, or those of this module."""
    ranges = list[LostRange]()
    for log, rule, _, _, end, read, away in sorted(
        (key_pass for key_pass in _passes_in(positions) if not key_pass.is_done),
        key=lambda key_pass: (key_pass.log, key_pass.rule, key_pass.away is not None, key_pass.read),
    ):
        if not positions.get(_KEY + _of_scope(scope_of(log), rule), 0) % 2:
            continue
        kind: RangeKind = "unread" if away is None else "away"
        unread = LostRange(log, kind, read, end, topic=topic_of_store(log), key=rule)
        if ranges and (last := ranges[-1]) == structs.replace(unread, begin=last.begin, end=read):
            # files that are away side by side
            ranges[-1] = structs.replace(last, end=end)
        else:
            ranges.append(unread)
    # the times of these messages are in the catalogs, which a lookup does not read
    return {lost.name: lost for lost in (unread.lost(0, MAX_TIMESTAMP_MS) for unread in ranges)}
