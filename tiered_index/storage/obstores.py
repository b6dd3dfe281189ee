"""Base of the backends that send requests through obstore, the binding of Rust's object_store.

obstore is loaded on use. Its threads do not survive a fork: a process that was forked after obstore was loaded can't
use it. Threads: any number.
"""

from __future__ import annotations

import functools
import importlib
import os
import re
import sys
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

# `RetryLoop` repeats requests and counts them
NO_RETRIES = {"max_retries": 0}
# A proxy that can't exist: nothing listens on port 0. obstore follows redirects, and would send signatures and tokens
# to the other host.
_NOWHERE = "127.0.0.1:0"
_ANSWERED = re.compile(r"status code: (\d{3})[^:]*: ?(.*?)(?:\n\nDebug source:|$)", re.DOTALL)
_forked_after_loading = False


def _after_fork() -> None:
    global _forked_after_loading
    _forked_after_loading = _forked_after_loading or "obstore" in sys.modules


os.register_at_fork(after_in_child=_after_fork)


@functools.cache
def _loaded() -> Any:
    try:
        importlib.import_module("obstore.store")
        return importlib.import_module("obstore")
    except ImportError:
        return None


def obstore() -> Any:
    """Return the module `obstore`; None if it is not installed or can't work in this process."""
    return None if _forked_after_loading else _loaded()


def errors() -> tuple[type[Exception], ...]:
    """Return the classes of obstore's errors, for failed requests and for invalid settings."""
    return obstore().exceptions.BaseError, OSError, ValueError


def client_options(
    hosts: Iterable[str],
    connections: int,
    *,
    allow_http: bool,
    connect_timeout_s: float = 5.0,
    read_timeout_s: float = 30.0,
) -> dict[str, Any]:
    """Return obstore's `client_options`. Requests to hosts other than `hosts` fail without leaving this machine."""
    return {
        "allow_http": allow_http,
        "connect_timeout": timedelta(seconds=connect_timeout_s),
        # From the request on, also while its body is sent, and then from each part of the response to the next
        "read_timeout": timedelta(seconds=read_timeout_s),
        # Of a whole request: the body of a response may take any time
        "timeout": timedelta(days=1),
        "pool_max_idle_per_host": str(connections),
        "proxy_url": f"http://{_NOWHERE}",
        "proxy_excludes": ",".join(hosts),
    }


def answered(text: str) -> tuple[int, str] | None:
    """Return status and body of an error response from the text of obstore's error; None: there was no response."""
    found = _ANSWERED.search(text)
    return (int(found[1]), found[2]) if found else None


def went_elsewhere(text: str) -> bool:
    """Return whether obstore's error says that a request was redirected to a host that is not allowed."""
    return f"{_NOWHERE}," in text
