"""The report of checks: findings (something is wrong), notes (unusual, but nothing is lost), and unchecked parts."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tiered_index.errors import CorruptFile, TieredIndexError
from tiered_index.format.verify import Finding
from tiered_index.service.log.records import LostObject, StoredObject
from tiered_index.service.read.files.compacted import CompactedFile

Progress = Callable[[int, str], None]
"""Called with the number of checked things, and a word for them."""


@dataclass(frozen=True, slots=True)
class Defect:
    """One finding: the file or object, its part, the problem, and the byte position if it is known."""

    file: str
    part: str
    problem: str
    offset: int | None = None


@dataclass(frozen=True, slots=True)
class Missing:
    """The entries of one object that answers lack: their number, times (inclusive epoch ms) and known topics.

    `copy` is the path of a local copy, if there is one.
    """

    object: str
    file: str
    begin_ms: int
    end_ms: int
    entries: int
    topics: tuple[str, ...] | None = None
    copy: str | None = None

    @classmethod
    def of(cls, gone: StoredObject | LostObject, copy: CompactedFile | None = None) -> Missing:
        """Describe the entries that are missing with an object. `copy` is its local copy."""
        lost = (gone if isinstance(gone, LostObject) else LostObject.of(gone)).lost_file()
        missing = cls(gone.name, lost.file, lost.begin_ms, lost.end_ms, lost.entries)
        if copy is None or copy.local is None:
            return missing
        topics = tuple(sorted(name for _, name in copy.metadata().topics))
        return replace(missing, topics=topics or None, copy=copy.local.file)


@dataclass
class Report:
    """The results of checks. Any thread may call its methods.

    `missing` are objects that the storage should have. `lost` are objects that were given up.
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
        """Add the findings of a file's check."""
        for finding in findings:
            self.add(file, finding.part, finding.problem, finding.offset)

    def add_error(self, file: str, part: str, error: TieredIndexError) -> None:
        """Add an error as a finding."""
        offset = error.offset if isinstance(error, CorruptFile) else None
        self.add(file, part, error.problem if isinstance(error, CorruptFile) else str(error), offset)

    def add_report(self, other: Report) -> None:
        """Add the results of another report."""
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
        """Count checked things."""
        with self._lock:
            self.checked[what] += number

    @property
    def status(self) -> str:
        """``ok``, ``findings``, or ``incomplete``: no findings, but some parts could not be read."""
        return "findings" if self.findings else "incomplete" if self.unchecked else "ok"

    def to_dict(self) -> dict[str, Any]:
        """Return the report as a JSON-ready dict."""
        return {
            "status": self.status,
            "checked": dict(self.checked),
            "findings": [asdict(defect) for defect in self.findings],
            "notes": self.notes,
            "missing": [asdict(lacking) for lacking in self.missing],
            "lost": [asdict(lacking) for lacking in self.lost],
            "unchecked": [
                {"what": what, "type": type(error).__name__, "message": str(error)} for what, error in self.unchecked
            ],
        }
