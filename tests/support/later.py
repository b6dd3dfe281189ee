"""A storage whose clock is ahead: its objects look old to a sweep, without waiting."""

from tiered_index.service.jobs.orphans import delete_orphans, find_orphans
from tiered_index.service.log.log import StorageLog
from tiered_index.storage.base import Storage, WrapperStorage


class Later(WrapperStorage):
    """`inner`, with a clock that is `seconds` ahead."""

    def __init__(self, inner: Storage, seconds: float) -> None:
        super().__init__(inner)
        self._ahead_ms = round(seconds * 1000)

    def now_ms(self) -> int:
        return super().now_ms() + self._ahead_ms


def sweep(storage: Storage, log: StorageLog, later_s: float = 2 * 86_400) -> None:
    """Delete the orphans of a storage as if so many seconds had passed since they were sent."""
    later = Later(storage, later_s)
    delete_orphans(later, find_orphans(later, log))
