"""The handlers of files, costs and verifications. Verifications run as background jobs, one at a time. Threads: any."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from functools import partial

import pyarrow as pa
from starlette.requests import Request
from starlette.responses import Response

from tiered_index.base.threads import DaemonPool
from tiered_index.server.http import answers, wire
from tiered_index.server.http.answers import Verification
from tiered_index.server.http.calls import Calls, Handlers, body_of, caller_of
from tiered_index.server.http.metrics import Metrics
from tiered_index.server.http.operations import Operation
from tiered_index.server.http.parameters import DuParameters, Nothing, VerifyBody, of_body
from tiered_index.server.http.problems import Refused, problem_of
from tiered_index.server.http.served import Served
from tiered_index.service.jobs.verify import check_index
from tiered_index.service.jobs.verify_report import Report
from tiered_index.service.read.inventory import describe_handle, du_document, du_groups, files_document

_MOST = 16
_RETRY_S = 5


class StoredHandlers(Handlers):
    """Handlers of the list of files, of one file, of the cost by topic, day and state, and of verifications."""

    def __init__(self, served: Served, calls: Calls, metrics: Metrics) -> None:
        super().__init__(served, calls, metrics)
        # The last ones, by id
        self._jobs: dict[str, Verification] = {}
        self._pool = DaemonPool(1, "tiered-index-verify")

    @Operation("GET /v1/files", answer=answers.Files, forms=(wire.NDJSON,))
    async def files(self, request: Request, _: Nothing) -> Response:
        """List all files, window tables and archived segments.

        A service of several indexes answers 400.
        """
        caller_of(request).need_every_topic("files hold entries")
        lookups, is_ndjson = self.served.lookups, wire.form_of(request.headers.get("accept")) == wire.NDJSON
        form = wire.NDJSON if is_ndjson else wire.JSON

        def act() -> bytes | Iterator[bytes]:
            index_id, redacted = self.served.index_id, self.served.redaction.document
            handles = lookups.files()
            document = files_document(index_id, lookups.log_state, handles, lookups.segments())
            files = map(redacted, document.pop("files"))
            return wire.list_document(redacted(document) | {"files": files}, "files", form)

        return await self.answer(request, self.allowance(), act, form)

    @Operation(
        "GET /v1/files/{id}",
        answer=answers.File,
        part="Id of the file or window table.",
        problems={404: "No such file or window table."},
    )
    async def file(self, request: Request, _: Nothing) -> Response:
        """Show one file, without reading its entries."""
        caller_of(request).need_every_topic("files hold entries")
        file_id = str(request.path_params["id"])

        def act() -> bytes:
            lookups = self.served.lookups
            handles = [handle for handle in lookups.files() if handle.file_id == file_id]
            if not handles:
                raise Refused(404, f"no file has the id {file_id!r:.80}")
            topics = handles[0].known_topics
            document = describe_handle(handles[0]) | {"topics": None if topics is None else sorted(topics)}
            return wire.encode(self.served.redaction.document(document))

        return await self.answer(request, self.allowance(), act, wire.JSON)

    @Operation("GET /v1/du", answer=answers.Du, problems={422: "A bound of the service was reached."})
    async def du(self, request: Request, params: DuParameters) -> Response:
        """Show stored entries, bytes and monthly cost by topic, day and state.

        A service of several indexes answers 400.
        """
        caller, lookups = caller_of(request), self.served.lookups

        def act() -> bytes | Iterator[bytes]:
            by = du_groups(params.by)
            table = lookups.du()
            if caller.topics is not None:
                # rows without a topic are about all topics
                seen = [topic is not None and caller.sees(topic) for topic in table["topic"].to_pylist()]
                table = table.filter(pa.array(seen, pa.bool_()))
            document = du_document(table, by, self.served.index_id, lookups.log_state.number, self.prices)
            return wire.list_document(document, "rows", wire.JSON)

        return await self.answer(request, self.allowance(), act, wire.JSON)

    @Operation(
        "POST /v1/verify",
        body=VerifyBody,
        bodies={wire.JSON: {"deep": True}},
        answer=Verification,
        status=202,
        problems={409: "Another verification is running."},
    )
    async def verify(self, request: Request, _: Nothing) -> Response:
        """Start a check of all checksums.

        The header `Location` of the answer is the URL of the progress. A service of several indexes answers 400.
        """
        _need_admin(request)
        body = await body_of(request, wire.JSON)

        params = of_body(VerifyBody, body)
        # raises if there are several indexes
        assert self.served.index_id
        job = self._begin(request.state.request_id, deep=params.deep)
        return Response(wire.encode(job), 202, {"location": f"/v1/verify/{job.id}"}, wire.JSON)

    @Operation(
        "GET /v1/verify/{id}",
        answer=Verification,
        part="Id of the verification.",
        problems={404: "No such verification."},
        is_light=True,
    )
    async def verification(self, request: Request, _: Nothing) -> Response:
        """Show the progress of a verification, and its report at the end."""
        _need_admin(request)
        job_id = str(request.path_params["id"])
        if (job := self._jobs.get(job_id)) is None:
            raise Refused(404, f"no verification has the id {job_id!r:.80}")
        return Response(wire.encode(job), media_type=wire.JSON)

    def _begin(self, request_id: str, *, deep: bool) -> Verification:
        """Begin a job, and forget an old one. Raises `Refused` if one is under way."""
        if any(job.state == "running" for job in self._jobs.values()):
            raise Refused(409, "a verification is under way: try again when it has ended", retry_after_s=_RETRY_S)
        job = Verification(id=secrets.token_hex(8), deep=deep, begun_ms=time.time_ns() // 1_000_000)
        # raises if there is no thread
        self._pool.submit(self._run, job, request_id)
        self._jobs = dict([*self._jobs.items(), (job.id, job)][-_MOST:])
        return job

    def _run(self, job: Verification, request_id: str) -> None:
        report, is_done = Report(), False
        redaction = self.served.redaction
        try:
            seen = partial(_progress, job, "files"), partial(_progress, job, "objects")
            check_index(self.served.lookups.config, report, *seen, deep=job.deep, storage=self.served.lookups.storage)
            is_done = True
        except Exception as error:  # noqa: BLE001 - the job reports any error
            job.problem = answers.Problem(**problem_of(error, request_id, redaction))
        job.report = redaction.document(report.to_dict())
        job.ended_ms = time.time_ns() // 1_000_000
        job.state = "done" if is_done else "failed"

    def close(self) -> None:
        """Close the thread of jobs, too."""
        super().close()
        self._pool.close()


def _progress(job: Verification, doing: str, checked: int, _detail: str = "") -> None:
    job.checked, job.doing = checked, doing


def _need_admin(request: Request) -> None:
    caller = caller_of(request)
    caller.need("admin")
    caller.need_every_topic("files hold entries")
