"""An S3 server whose listings lie: pages of three objects that name no successor, or the same one again."""

import contextlib
import re
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from tests.storage.scripted_server import Answer, Request, answer_of, scripted_server
from tests.support.object_store import Store, unchunked

PAGE = 3
_TOKEN = re.compile(rb"<NextContinuationToken>.*?</NextContinuationToken>")
_SAME = b"<NextContinuationToken>t</NextContinuationToken>"
_OBJECTS = re.compile(rb"<Contents>.*</Contents>", re.DOTALL)


class LyingServer(Store):
    """Objects of any bucket. `lists` has the query of each listing. `lies` are some of:

    - ``no token``: a page that has a successor has no token of it.
    - ``same token``: every page has a successor, by one token, which begins again.
    - ``no objects``: the pages after the first one have no objects.
    - ``no start-after``: listings ignore it.
    """

    def __init__(self, folder: Path, endpoint_url: str) -> None:
        super().__init__(folder)
        self.endpoint_url = endpoint_url
        self.lies: set[str] = set()
        self.lists: list[dict[str, str]] = []

    def fill(self, place: str, names: Iterable[str], changed_s: float | None = None) -> None:
        """Store objects below ``bucket/prefix``, which were changed at a time."""
        for name in names:
            self._put(f"{place}/{name}", {}, b"x", "etag")
            if changed_s is not None:
                self.objects[f"{place}/{name}"] = replace(self.objects[f"{place}/{name}"], changed_s=changed_s)

    def script(self, request: Request) -> Answer:
        headers, query = request.lowered, parse_qs(urlsplit(request.path).query, keep_blank_values=True)
        body = unchunked(request.body) if "aws-chunked" in headers.get("content-encoding", "") else request.body
        if "list-type" not in query:
            return answer_of(self.answer(request.method, request.path, headers, body))
        self.lists.append({name: values[0] for name, values in query.items()})
        target = f"{request.path}&max-keys={PAGE}"
        token = query.get("continuation-token", [""])[0]
        if "no start-after" in self.lies:
            target = target.replace("start-after", "ignored")
        if "same token" in self.lies:
            target = target.replace("continuation-token", "ignored")
        answer = answer_of(self.answer(request.method, target, headers, body))
        if "no token" in self.lies:
            answer.body = _TOKEN.sub(b"", answer.body)
        if "same token" in self.lies:
            page = _TOKEN.sub(b"", answer.body).replace(b"<IsTruncated>false", b"<IsTruncated>true")
            answer.body = page.replace(b"</IsTruncated>", b"</IsTruncated>" + _SAME)
        if "no objects" in self.lies and token:
            answer.body = _OBJECTS.sub(b"", answer.body)
        answer.announced = None
        return answer


@contextlib.contextmanager
def lying_server() -> Iterator[LyingServer]:
    """Serve on a loopback port until the block ends."""
    with tempfile.TemporaryDirectory() as folder, scripted_server() as server:
        lying = LyingServer(Path(folder), server.endpoint_url)
        server.script = lying.script
        yield lying
