"""Turns errors into `application/problem+json` (RFC 9457), without local paths and stack traces.

The member `error` is the name of a class of `errors.py`, so that a client can raise it. Threads: any.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from starlette.responses import Response

from tiered_index.base.encoding import json_text
from tiered_index.config import IndexConfig
from tiered_index.errors import (
    BackPressure,
    BudgetExceeded,
    ConfigError,
    CorruptFile,
    IndexClosed,
    InvalidArgument,
    LockHeld,
    OwnedBySource,
    PartialAnswer,
    SchemaMismatch,
    StorageError,
    StorageUnavailable,
    TieredIndexError,
    WriterFenced,
)
from tiered_index.types import FileReport

MEDIA_TYPE = "application/problem+json"
# Headers of every response that has none of their own: no browser guesses its type, and no cache keeps what a token saw
PROTECTED = {"x-content-type-options": "nosniff", "cache-control": "no-store"}
# Most failed files that a problem names
_MOST_FAILED = 100
_RETRY_S = 1


class Refused(TieredIndexError):
    """The service refuses a request with an HTTP `status`. `retry_after_s`: when a repeat may succeed (None: never)."""

    def __init__(self, status: int, message: str, *, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


# HTTP status, and Retry-After, of the first class that matches an error
_STATUS: tuple[tuple[type[TieredIndexError], int, int | None], ...] = (
    (OwnedBySource, 403, None),
    (InvalidArgument, 400, None),
    (LockHeld, 409, None),
    (WriterFenced, 409, None),
    (SchemaMismatch, 409, None),
    (BudgetExceeded, 422, None),
    (PartialAnswer, 502, _RETRY_S),
    (StorageUnavailable, 502, _RETRY_S),
    (StorageError, 502, None),
    (CorruptFile, 502, None),
    (BackPressure, 503, _RETRY_S),
    (IndexClosed, 503, _RETRY_S),
    (ConfigError, 500, None),
)


@dataclass(frozen=True)
class Redaction:
    """Local paths, and the texts that replace them in answers."""

    stand_ins: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, config: IndexConfig, storages: Iterable[str] = (), **folders: Path | None) -> Redaction:
        """Return a redaction of an index's root, cache and local storages, and of further `folders` by name."""
        places = {"root": config.root, "cache": config.cache_dir, **folders}
        replacements = {str(path.absolute()): f"[{name}]" for name, path in places.items() if path is not None}
        for uri in (config.storage, *storages):
            parts = urlsplit(uri or "")
            if parts.scheme.lower() in ("file", "sqlite") and parts.path:
                path = Path(unquote(parts.path))
                replacements |= {parts.path: f"/{path.name}", str(path): f"/{path.name}"}
        # the longest first: one path may be within another
        return cls(tuple(sorted(replacements.items(), key=lambda pair: -len(pair[0]))))

    def text(self, text: str) -> str:
        """Return `text` without local paths."""
        for path, stand_in in self.stand_ins:
            text = text.replace(path, stand_in)
        return text

    def document(self, value: Any) -> Any:
        """Return a JSON value without local paths in texts and in names of members."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self.text(name): self.document(member) for name, member in value.items()}
        return [self.document(member) for member in value] if isinstance(value, list | tuple) else value


# Absolute paths, also in URIs of files. A text of `Redaction` in a URI has only one segment, and is kept.
_PATH = re.compile(r"""(?<![\w/:.\])}-])/[^\s'",;:)\]]+|\b(?:file|sqlite)://+[^\s/'",;:)\]]+/[^\s'",;)\]]*""")


def without_paths(text: str) -> str:
    """Return `text` without absolute paths of this host."""
    return _PATH.sub("[path]", text)


def problem_of(error: BaseException, request_id: str, redaction: Redaction) -> dict[str, Any]:
    """Return the problem document of an error. For an unexpected error, it has only the request's id."""
    name, status = "Unexpected", 500
    detail = f"unexpected error: look up {request_id} in the service's log"
    if isinstance(error, TieredIndexError):
        name, (status, _), detail = type(error).__name__, _status_of(error), redaction.text(str(error))
    document: dict[str, Any] = {
        "type": f"urn:tiered-index:error:{name}",
        "title": HTTPStatus(status).phrase if status != 499 else "Client Closed Request",
        "status": status,
        "detail": detail,
        "error": name,
        "request_id": request_id,
    }
    if isinstance(error, PartialAnswer):
        reports = [file.to_dict() for file in error.failed[:_MOST_FAILED] if isinstance(file, FileReport)]
        document["failed"] = redaction.document(reports)
    return document


def _status_of(error: BaseException) -> tuple[int, int | None]:
    if isinstance(error, Refused):
        return error.status, error.retry_after_s
    return next(((status, after_s) for kind, status, after_s in _STATUS if isinstance(error, kind)), (500, None))


class ProblemResponse(Response):
    """The response with the problem document of an error."""

    media_type = MEDIA_TYPE

    def __init__(self, error: BaseException, request_id: str, redaction: Redaction) -> None:
        document = problem_of(error, request_id, redaction)
        status, retry_after_s = _status_of(error)
        headers = {"retry-after": str(retry_after_s)} if retry_after_s is not None else {}
        headers |= {"www-authenticate": "Bearer"} if status == 401 else {}
        super().__init__(json_text(document), status, PROTECTED | headers)
