"""Serves the console: static files of a page that calls this service.

They have no data and need no token: the page asks for one. They have no inline scripts or styles, so that their content
security policy allows only the service's own files. Threads: any.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from tiered_index.server.http.problems import Refused

FOLDER = Path(__file__).parent
_AT = "/console"
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_FILES = frozenset(path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*") if path.suffix in _TYPES)
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


def routes() -> list[Route]:
    """Return the routes of the console, which `openapi.json` does not describe. They send the files as they are now."""
    files = {name: _file(FOLDER / name) for name in _FILES}

    async def send(request: Request) -> Response:
        if (file := files.get(request.path_params["name"] or "index.html")) is None:
            raise Refused(404, "the console has no such file")
        if (etag := file.headers["etag"]) in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=_HEADERS | {"etag": etag})
        return file

    return [*(Route(at, _lead) for at in ("/", _AT)), Route(_AT + "/{name:path}", send)]


def _file(path: Path) -> Response:
    content = path.read_bytes()
    # not Starlette's, which is of time and size: a build may give the files of all versions one time
    etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    return Response(content, headers=_HEADERS | {"etag": etag}, media_type=_TYPES[path.suffix])


async def _lead(_: Request) -> Response:
    # relative, because a proxy may add a path prefix
    return RedirectResponse(f"{_AT}/".lstrip("/"), 307)
