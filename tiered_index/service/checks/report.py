"""The report of checks: findings (something is wrong), notes (something is odd, nothing is lost), unchecked parts."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tiered_index.errors import CorruptFile, TieredIndexError
from tiered_index.format.verify import Finding
from tiered_index.service.files.compacted import CompactedFile
from tiered_index.service.log.records import LostObject, StoredObject

Progress = Callable[[int, str], None]
"""Gets the number of things checked, and the name of such things."""


@dataclass(frozen=True, slots=True)
class Defect:
    """One finding: the file or object, the part of it, what is wrong, and where."""

    file: str
    part: str
    problem: str
    offset: int | None = None


@dataclass(frozen=True, slots=True)
class Missing:
    """The entries of one object that answers miss, by number and time (inclusive epoch ms), and topics as far as known.
    The same file is at `copy`, if that is not None.
    """

    object: str
    file: str
    begin_ms: int
    end_ms: int
    entries: int
    topics: tuple[str, ...] | None = None
    copy: str | None = None

    @classmethod
    def of(cls, one: StoredObject | LostObject, copy: CompactedFile | None = None) -> Missing:
        """Return what is missing where `one` is."""
        told = (one if isinstance(one, LostObject) else LostObject.of(one)).told()
        missing = cls(one.name, told.file, told.begin_ms, told.end_ms, told.entries)
        if copy is None or copy.local is None:
            return missing
        topics = tuple(sorted(name for _, name in copy.metadata().topics))
        return replace(missing, topics=topics or None, copy=copy.local.file)


@dataclass
class Report:
    """Gathered results. `add`, `note`, `count` may be called from any thread. `missing` are objects that the storage
    should have, `lost` those that were given up.
    """

    findings: list[Defect] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    missing: list[Missing] = field(default_factory=list)
    lost: list[Missing] = field(default_factory=list)
    unchecked: list[tuple[str, TieredIndexError]] = field(default_factory=list)
    checked: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, file: str, part: str, problem: str, offset: int | None = None) -> None:
        """Add a finding."""
        with self._lock:
            self.findings.append(Defect(file, part, problem, offset))

    def add_all(self, file: str, findings: list[Finding]) -> None:
        """Add what a file's own check found."""
        for finding in findings:
            self.add(file, finding.part, finding.problem, finding.offset)

    def add_error(self, file: str, part: str, error: TieredIndexError) -> None:
        """Add an error that was met while reading."""
        offset = error.offset if isinstance(error, CorruptFile) else None
        self.add(file, part, error.problem if isinstance(error, CorruptFile) else str(error), offset)

    def add_report(self, other: Report) -> None:
        """Add what another report gathered, from wherever it comes."""
        with self._lock:
            self.findings += other.findings
            self.notes += other.notes
            self.missing += other.missing
            self.lost += other.lost
            self.unchecked += other.unchecked
            self.checked.update(other.checked)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    def note(self, text: str) -> None:
        """Add a note."""
        with self._lock:
            self.notes.append(text)

    def count(self, what: str, number: int = 1) -> None:
        """Count something that was checked."""
        with self._lock:
            self.checked[what] += number

    @property
    def status(self) -> str:
        """``ok``, ``findings``, or ``incomplete``: nothing wrong so far, but not all could be read."""
        return "findings" if self.findings else "incomplete" if self.unchecked else "ok"

    def to_dict(self) -> dict[str, Any]:
        """Return the report JSON-ready."""
        return {
            "status": self.status,
            "checked": dict(self.checked),
            "findings": [asdict(defect) for defect in self.findings],
            "notes": self.notes,
            "missing": [asdict(one) for one in self.missing],
            "lost": [asdict(one) for one in self.lost],
            "unchecked": [
                {"what": what, "type": type(error).__name__, "message": str(error)} for what, error in self.unchecked
            ],
        }
