"""The handlers of files and costs. Threads: any."""

from __future__ import annotations

import time

import pyarrow as pa
from starlette.requests import Request
from starlette.responses import Response

from tiered_index.server import answers, wire
from tiered_index.server.calls import Handlers, caller_of
from tiered_index.server.operations import Operation
from tiered_index.server.parameters import DuParameters, Nothing
from tiered_index.server.problems import Refused
from tiered_index.service.read.inventory import describe_handle, du_document, du_groups, files_document
from tiered_index.storage.context import deadline_at


class StoredHandlers(Handlers):
    """Handlers of the list of files, of one file, and of the cost by topic, day and state."""

    @Operation("GET /v1/files", answer=answers.Files, forms=(wire.NDJSON,))
    async def files(self, request: Request, _: Nothing) -> Response:
        """List all files, window tables and archived segments.

        A service of several indexes answers 400.
        """
        caller_of(request).need_every_topic("files hold entries")
        lookups, ndjson = self.served.lookups, wire.form_of(request.headers.get("accept")) == wire.NDJSON

        def act() -> bytes:
            index_id = self.served.index_id
            document = files_document(index_id, lookups.log_state.number, lookups.files(), lookups.segments())
            document = self.served.redaction.document(document)
            if ndjson:
                files = document.pop("files")
                return b"".join(map(wire.encode, [*files, document]))
            return wire.encode(document)

        form = wire.NDJSON if ndjson else wire.JSON
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
            handles = [handle for handle in self.served.lookups.files() if handle.file_id == file_id]
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
        allowance = self.allowance()

        def act() -> bytes:
            by = du_groups(params.by)
            with deadline_at(time.monotonic() + allowance.left_s()):
                table = lookups.du()
            if caller.topics is not None:
                # rows without a topic are about all topics
                seen = [topic is not None and caller.sees(topic) for topic in table["topic"].to_pylist()]
                table = table.filter(pa.array(seen, pa.bool_()))
            return wire.encode(du_document(table, by, self.served.index_id, lookups.log_state.number, self.prices))

        return await self.answer(request, allowance, act, wire.JSON)
