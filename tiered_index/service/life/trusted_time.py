"""The present time by which a writer expires entries by itself: no clock that is wrong once may expire an index.

A time is trusted only if this machine's clock and the storage's agree, and if it is no later than the last trusted time
by the monotonic clock, plus an hour. A new process has no last time: its first one may be a month after the newest
expiry or publication in the log. A refused time changes nothing. The command `expire --yes` accepts any time on which
the clocks agree, and a writer continues from that. One thread.
"""

from __future__ import annotations

from tiered_index.base.clock import Clock, SteadyClock
from tiered_index.base.units import format_time, human_duration
from tiered_index.errors import ConfigError, without_frames
from tiered_index.service.jobs.expiry import agreed_now_ms
from tiered_index.service.log.state import LogState
from tiered_index.storage.base import Storage

# seconds after which a refused time is asked for again
_AGAIN_S = 60.0
_MOST_JUMP_MS = 3_600_000
_MOST_PAUSE_MS = 31 * 86_400_000
"""The longest pause of an index after which a new writer trusts the clocks, and the longest of a machine."""


class TrustedTime:
    """The trusted time of one writer."""

    def __init__(self, storage: Storage, clock: Clock) -> None:
        self._storage, self._clock = storage, clock
        # the newest time in the log before this writer added a record; None: the log was not read yet
        self._known_ms: int | None = None
        # the last trusted time, and the monotonic time then
        self._last: tuple[int, float] | None = None
        # why the last time was refused, and the monotonic time until which it is not asked for again
        self._refused: tuple[ConfigError, float] | None = None
        self._followed_s = clock.monotonic_s()
        # the storage's time at the last sweep, and the monotonic time then
        self._storage_time: tuple[int, float] | None = None

    def learn(self, state: LogState) -> None:
        """Take the newest time from the log as it is before this writer adds records, and the storage's time.

        Later calls change nothing. Raises the errors of the storage.
        """
        if self._known_ms is None:
            # from now on, because the first sweep may be an hour later
            self.check_storage()
            self._known_ms = max(state.expiry_ms, state.put_before_ms)

    def now_ms(self, state: LogState) -> int:
        """Return the present time of an expiry, epoch milliseconds.

        Raises `ConfigError` if it can't be trusted, and the errors of the storage.
        """
        if self._refused is not None and self._clock.monotonic_s() < self._refused[1]:
            raise self._refused[0]
        self._refused = None
        try:
            return self._checked_ms(state)
        except ConfigError as error:
            self._refused = without_frames(error), self._clock.monotonic_s() + _AGAIN_S
            raise

    def _checked_ms(self, state: LogState) -> int:
        now_ms, now_s = agreed_now_ms(self._storage, self._clock), self._clock.monotonic_s()
        if state.expiry_ms - now_ms > _MOST_JUMP_MS:
            raise ConfigError(
                f"nothing expires: the clocks say {format_time(now_ms)}, before the time of the last expiry, "
                f"{format_time(state.expiry_ms)}. If the clocks are wrong, set them. If they are right, that expiry "
                "hides entries that have not reached their age, perhaps also those that you put now: index the "
                "messages again in a new index"
            )
        if self._last is not None:
            last_ms, last_s = self._last
            last_ms += round((now_s - last_s) * 1000)
            self._check(now_ms, max(last_ms, state.expiry_ms), _MOST_JUMP_MS)
            now_or_last_ms = max(now_ms, last_ms)
        else:
            if known_ms := max(self._known_ms or 0, state.expiry_ms):
                self._check(now_ms, known_ms, _MOST_PAUSE_MS)
            now_or_last_ms = now_ms
        self._last = now_or_last_ms, now_s
        return now_ms

    def check_storage(self) -> None:
        """Raise `ConfigError` if the storage's clock has jumped ahead since the last call: objects would look old.

        The next call compares with this one.
        """
        now_ms, now_s, last = self._storage.now_ms(), self._clock.monotonic_s(), self._storage_time
        self._storage_time = now_ms, now_s
        if last is not None and (jump_ms := now_ms - last[0] - round((now_s - last[1]) * 1000)) > _MOST_JUMP_MS:
            raise ConfigError(
                f"no orphan is deleted now: the clock of {self._storage.uri} is {human_duration(jump_ms // 1000)} "
                "further than the time since the last sweep; the next one is in an hour"
            )

    def follow_wall(self) -> None:
        """Let the writer's clock follow the wall clock after a jump, if the storage's clock made it, too.

        A machine that was suspended comes to this. Raises the errors of the storage.
        """
        clock, now_s = self._clock, self._clock.monotonic_s()
        if isinstance(clock, SteadyClock) and 0 < abs(clock.jump_ms()) <= _MOST_PAUSE_MS and now_s >= self._followed_s:
            try:
                agreed_now_ms(self._storage, clock)
            except ConfigError:
                self._followed_s = now_s + _AGAIN_S
                return
            clock.trust()

    def _check(self, now_ms: int, last_ms: int, most_ms: int) -> None:
        if now_ms - last_ms > most_ms:
            raise ConfigError(
                f"nothing expires by itself: the clocks say {format_time(now_ms)}, "
                f"{human_duration((now_ms - last_ms) // 1000)} after {format_time(last_ms)}, the last time that was "
                f"sure; at most {human_duration(most_ms // 1000)} are trusted. If the clocks are right, run "
                "`tiered-index expire --yes` once with the rule of retention"
            )
