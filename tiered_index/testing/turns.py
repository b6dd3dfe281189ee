"""Which of the matching calls a scripted fault strikes. Threads: those that hold the lock of whoever counts."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Turns"]


@dataclass(slots=True)
class Turns:
    """Lets `skip` calls pass and strikes the next `times` (None: all from then on)."""

    skip: int
    times: int | None

    def strikes(self) -> bool:
        """Count one matching call and tell whether it is struck."""
        if self.skip > 0:
            self.skip -= 1
            return False
        if self.times is None:
            return True
        self.times -= 1
        return self.times >= 0
