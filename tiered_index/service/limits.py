"""The process's limit of open files, which a root of many files needs to be more than the usual 1,024."""

from __future__ import annotations

import contextlib
import logging
import resource

__all__ = ["allow_many_files"]

_WANTED = 1 << 16
# as many mappings as Linux allows a process by default; each file that is open for reading takes a descriptor
_log = logging.getLogger(__name__)


def allow_many_files() -> None:
    """Raise the soft limit of open files towards the hard one, where it is low. Where that is refused the limit stays as it is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED if hard == resource.RLIM_INFINITY else min(_WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            _log.debug("soft limit of open files raised from %d to %d", soft, wanted)
