"""Runs verifications as background jobs, one at a time, and keeps the last 16. Threads: any."""

from __future__ import annotations

import secrets
import threading
import time
from collections import OrderedDict
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from tiered_index.server import answers, wire
from tiered_index.server.answers import Verification
from tiered_index.server.calls import Calls, Handlers, body_of, caller_of
from tiered_index.server.metrics import Metrics
from tiered_index.server.operations import Operation
from tiered_index.server.parameters import Nothing, VerifyBody, of_body
from tiered_index.server.problems import Refused, problem_of
from tiered_index.server.served import Served
from tiered_index.service.jobs.verify import check_index
from tiered_index.service.jobs.verify_report import Report
from tiered_index.storage.pools import DaemonPool

_MOST = 16
_RETRY_S = 5


class VerificationHandlers(Handlers):
    """Handlers that begin and show verifications of the index."""

    def __init__(self, served: Served, calls: Calls, metrics: Metrics) -> None:
        super().__init__(served, calls, metrics)
        self._lock = threading.Lock()
        self._jobs: OrderedDict[str, Verification] = OrderedDict()
        self._pool = DaemonPool(1, "tiered-index-verify")

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
        body = await body_of(request, self.served.caps.body_bytes, wire.JSON)

        def act() -> Verification:
            params = of_body(VerifyBody, body)
            # raises if there are several indexes
            assert self.served.index_id
            return self._begin(request.state.request_id, deep=params.deep)

        job = await self.calls.run(request, self.allowance(), act)
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
        with self._lock:
            if (job := self._jobs.get(job_id)) is None:
                raise Refused(404, f"no verification has the id {job_id!r:.80}")
        return Response(wire.encode(job), media_type=wire.JSON)

    def _begin(self, request_id: str, *, deep: bool) -> Verification:
        """Begin a job. Raises `Refused` if one is under way."""
        with self._lock:
            if any(job.state == "running" for job in self._jobs.values()):
                raise Refused(409, "a verification is under way: try again when it has ended", retry_after_s=_RETRY_S)
            job = Verification(id=secrets.token_hex(8), deep=deep, begun_ms=time.time_ns() // 1_000_000)
            self._jobs[job.id] = job
            while len(self._jobs) > _MOST:
                self._jobs.popitem(last=False)
        try:
            self._pool.submit(self._run, job, request_id)
        except BaseException:  # no thread runs it
            with self._lock:
                del self._jobs[job.id]
            raise
        return job

    def _run(self, job: Verification, request_id: str) -> None:
        report, is_done = Report(), False
        redaction = self.served.redaction
        try:
            seen = partial(_progress, job, "files"), partial(_progress, job, "objects")
            check_index(self.served.lookups.config, report, *seen, deep=job.deep)
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
