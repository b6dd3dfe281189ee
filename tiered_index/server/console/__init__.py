"""Serves the console: static files of a page that calls this service.

They have no data and need no token: the page asks for one. They have no inline scripts or styles, so that their content
security policy allows only the service's own files. Threads: any.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

FOLDER = Path(__file__).parent
_AT = "/console"
_FILES = frozenset(
    path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*") if path.suffix in (".html", ".css", ".js", ".svg")
)
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    # revalidated each time: after an upgrade the browser must not use an old page
    "cache-control": "no-cache",
    "content-security-policy": _POLICY,
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
}
PATHS = frozenset({"/", _AT, f"{_AT}/", *(f"{_AT}/{name}" for name in _FILES)})
"""The paths of the console, which need no token."""


class _Page(StaticFiles):
    def lookup_path(self, path: str) -> tuple[str, os.stat_result | None]:
        # the folder has Python's files, too
        return super().lookup_path(path) if os.path.normpath(path) in (".", *_FILES) else ("", None)

    def file_response(self, *of_file: Any) -> Response:
        response = super().file_response(*of_file)
        response.headers.update(_HEADERS)
        return response


def routes() -> list[BaseRoute]:
    """Return the routes of the console, which `openapi.json` does not describe."""
    return [*(Route(at, _lead) for at in ("/", _AT)), Mount(_AT, _Page(directory=FOLDER, html=True))]


async def _lead(_: Request) -> Response:
    # relative, because a proxy may add a path prefix
    return RedirectResponse(f"{_AT}/".lstrip("/"), 307)
