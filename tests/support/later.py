"""A storage whose clock is ahead: its objects look old to a sweep, without waiting."""

from __future__ import annotations

from tiered_index.storage.base import Storage, WrapperStorage


class Later(WrapperStorage):
    """`inner`, with a clock that is `seconds` ahead."""

    def __init__(self, inner: Storage, seconds: float) -> None:
        super().__init__(inner)
        self._ahead_ms = round(seconds * 1000)

    def now_ms(self) -> int:
        return super().now_ms() + self._ahead_ms
