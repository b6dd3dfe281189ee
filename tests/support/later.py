"""A storage whose clock is ahead: what it holds looks old to a sweep, without waiting."""

from __future__ import annotations

from tiered_index.storage.base import Storage, WrapperStorage


class Later(WrapperStorage):
    """`inner`, as it is `seconds` later."""

    def __init__(self, inner: Storage, seconds: float) -> None:
        super().__init__(inner)
        self._ahead_ms = round(seconds * 1000)

    def now_ms(self) -> int:
        return super().now_ms() + self._ahead_ms
