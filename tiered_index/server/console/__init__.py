"""Serves the console: static files of a page that calls this service.

They have no data and need no token: the page asks for one. They have no inline scripts or styles, so that their content
security policy allows only the service's own files. Threads: any; files are read once.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from tiered_index.server.problems import Refused

FOLDER = Path(__file__).parent
_AT = "/console/"
_INDEX = "index.html"
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
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
    "x-content-type-options": "nosniff",
}


def _file(path: Path) -> Response:
    content = path.read_bytes()
    etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    return Response(content, headers=_HEADERS | {"etag": etag}, media_type=_TYPES[path.suffix])


class Console:
    """The console's files, by their paths below `/console/`."""

    def __init__(self) -> None:
        files = (path for path in FOLDER.rglob("*") if path.suffix in _TYPES)
        self._files = {path.relative_to(FOLDER).as_posix(): _file(path) for path in files}

    @property
    def paths(self) -> frozenset[str]:
        """The paths that need no token."""
        return frozenset({"/", _AT.rstrip("/"), _AT, *(_AT + name for name in self._files)})

    def routes(self) -> list[Route]:
        """Return the routes, which `openapi.json` does not describe."""
        return [Route(_AT + "{name:path}", self._send), *(Route(at, self._lead) for at in ("/", _AT.rstrip("/")))]

    async def _lead(self, request: Request) -> Response:
        # relative, because a proxy may add a path prefix
        return RedirectResponse(_AT.lstrip("/"), 307)

    async def _send(self, request: Request) -> Response:
        file = self._files.get(str(request.path_params["name"]) or _INDEX)
        if file is None:
            raise Refused(404, "the console has no such file")
        if (etag := file.headers["etag"]) in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=_HEADERS | {"etag": etag})
        return file
