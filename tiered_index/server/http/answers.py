"""Models of the service's answers. `operations` describes answers by them, and their docstrings the members.

The answers of lookups are documents of the library (`to_dict`), which are faster to encode than a model. Their models
are made of the library's classes. The service makes its other answers as these models. Threads: any.

A model has the name of the document that it describes, because the description (OpenAPI) publishes this name: clients
are made from it.
"""

from __future__ import annotations

import inspect
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from tiered_index import types
from tiered_index.service.read.answers import messages as read_messages
from tiered_index.service.read.answers.messages import MessageState
from tiered_index.types import Explain, FileReport, IndexItem, LostFile


class Document(Struct, kw_only=True):
    """An answer, or a part of one. A member is in every document, unless it may be UNSET."""

    def to_dict(self) -> dict[str, Any]:
        """Return the document, JSON-ready."""
        return msgspec.to_builtins(self)  # type: ignore[no-any-return]


class File(Document, kw_only=True):
    """A file or window table of the index.

    - `file_id`: Id of the file or window table.
    - `state`: State in the life cycle, such as `unsealed`, `compacted`, `uploaded` or `storage`.
    - `lane`: `main`, or `quarantine` for entries with an implausible time.
    - `sequence`: Number of the file in its lane.
    - `begin_ms`: Time of the first entry, epoch milliseconds.
    - `end_ms`: Time of the last entry, inclusive.
    - `entries`: Number of entries. Null: not known.
    - `bytes`: Size. Null: not known.
    - `path`: Local path. Null: there is no local file.
    - `object`: Name of the object in the storage. Null: it is not uploaded.
    - `table`: Window and shards of a window table. Null: it is a file.
    - `error`: Reason why the file can't be read. Null: it can be read.
    - `topics`: Topics of the file. Null: not known.
    """

    file_id: str
    state: str
    lane: str
    sequence: int
    begin_ms: int
    end_ms: int
    entries: int | None
    bytes: int | None
    path: str | None
    object: str | None = None
    table: dict[str, Any] | None = None
    error: str | None = None
    topics: list[str] | UnsetType | None = UNSET


class Problem(Document, kw_only=True):
    """An error (RFC 9457).

    - `type`: URI of the kind of problem.
    - `title`: Phrase of the HTTP status.
    - `status`: HTTP status.
    - `detail`: The cause, and the remedy.
    - `error`: Class of the error in the Python library.
    - `request_id`: Id of the request, also in the service's log.
    - `failed`: Files that could not be read.
    """

    type: str
    title: str
    status: int
    detail: str
    error: str
    request_id: str
    failed: list[FileReport] | UnsetType = UNSET


class FetchedMessage(Document, kw_only=True):
    """An entry and its message.

    - `state`: Place of the message, or reason why there is none.
    - `item`: The entry. Null: the request named a place.
    - `message`: The message. Null: there is none.
    - `read_from`: File or address from which the message was read.
    - `problem`: Reason why the message could not be read.
    """

    state: MessageState
    item: IndexItem | None
    message: dict[str, Any] | None
    read_from: str | None
    problem: str | None


def _document_of(kind: type[types.Answer], base: type[Document], **instead: Any) -> Any:
    """Return a model of the documents of a class of the library, with its members beyond those of `base`.

    Its docstring has the first and the last paragraph of the class's: the meanings of the answer and of its members.
    `instead` has the types of members that the service makes itself.
    """
    first, *_, last = inspect.cleandoc(kind.__doc__ or "").split("\n\n")
    members = (kind.members() | instead).items()
    own = [(name, of) for name, of in members if name not in base.__struct_fields__]
    about: dict[str, Any] = {"__doc__": f"{first}\n\n{last}"}
    return msgspec.defstruct(kind.__name__, own, bases=(base,), namespace=about, module=__name__, kw_only=True)


Answer = _document_of(types.Answer, Document)
QueryResult = _document_of(types.QueryResult, Answer)
TopicsResult = _document_of(types.TopicsResult, Answer)
MessagesResult = _document_of(read_messages.MessagesResult, Answer, messages=list[FetchedMessage])


class BatchAnswer(Document, kw_only=True):
    """The answer to one lookup of a batch. The batch has the other members of an answer.

    - `items`: Entries, the newest first.
    - `status`: `complete`; `truncated`: continue with `cursor`; `partial`: `failed` names the files that the answer
      lacks.
    - `cursor`: Continues a truncated answer. Null: there is no more.
    - `unknown_topics`: Has the topic if no file in the time range has it. Otherwise empty.
    - `expired_before_ms`: Entries before this time have expired. Null: nothing expired in the range.
    - `replaced`: Number of rows of files that were left out, because a newer reading of their file replaced them.
    - `failed`: Files that could not be read.
    - `lost`: Lost files that may have had entries of the answer.
    """

    items: list[IndexItem]
    status: Literal["complete", "truncated", "partial"] = "complete"
    cursor: str | None = None
    unknown_topics: list[str] = []
    expired_before_ms: int | None = None
    replaced: int = 0
    failed: list[FileReport] | UnsetType = UNSET
    lost: list[LostFile] | UnsetType = UNSET


class BatchAnswers(Answer, kw_only=True):  # type: ignore[call-arg, misc, valid-type]
    """The answers to a batch.

    - `results`: Answers in the order of `lookups`.
    - `status`: `partial`: a lookup is partial. `truncated`: a lookup is truncated. Otherwise `complete`.
    - `cursors`: The cursor of each truncated lookup. A member's name is the lookup's number in `lookups`, from `0`.
    - `partial`: Numbers of the partial lookups.
    - `failed`: Files that could not be read.
    - `timestamp_resolution_ms`: Resolution of times: 1,000.
    - `exceeded`: The bound that was reached, with `allow_spent`.
    - `unknown_topics`: Topics of lookups without an entry. No file in the time range of any lookup has them.
    """

    results: list[BatchAnswer]
    cursors: dict[str, str]
    partial: list[int]
    timestamp_resolution_ms: int
    exceeded: str | UnsetType = UNSET


class Placed(Document, kw_only=True):
    """A message, and its place.

    - `queue_id`: Queue of the message.
    - `queue_offset`: Offset of the message in its queue.
    - `message`: The message. Null: it can't be read.
    - `problem`: Reason why the message can't be read.
    """

    queue_id: int
    queue_offset: int
    message: dict[str, Any] | None
    problem: str | None


class Queue(Document, kw_only=True):
    """The queue offsets of a queue.

    - `queue_id`: The queue.
    - `begin`: First offset.
    - `end`: Offset after the last one.
    """

    queue_id: int
    begin: int
    end: int


class Browsed(Document, kw_only=True):
    """A page of the messages of a topic.

    - `topic`: The topic.
    - `messages`: Messages, the oldest first. If a message can't be read, `message` is null and `problem` states the
      reason.
    - `earlier`: Cursor of the page before. Null: there is none.
    - `later`: Cursor of the page after. Null: there is none now.
    - `queues`: Queue offsets of each queue, from `begin` (inclusive) to `end` (exclusive).
    - `status`: `partial`: a message of the page can't be read.
    """

    topic: str
    messages: list[Placed]
    earlier: str | None
    later: str | None
    queues: list[Queue]
    status: Literal["complete", "partial"]
    explain: Explain | UnsetType = UNSET


class Files(Document, kw_only=True):
    """The files of the index.

    - `index_id`: Id of the index.
    - `log_number`: Number of the newest log record that the list includes.
    - `status`: `partial`: a file can't be read.
    - `files`: Files and window tables.
    - `totals`: Number of files in all and by state, and sums of their entries and bytes.
    - `archived`: Archived segments, at most 10,000.
    - `archived_more`: Whether there are more archived segments.
    """

    index_id: str
    log_number: int
    status: Literal["complete", "truncated", "partial"] = "complete"
    files: list[File]
    totals: dict[str, Any]
    archived: list[dict[str, Any]] = []
    archived_more: bool | UnsetType = UNSET


class Row(Document, kw_only=True):
    """The sums of one group.

    - `topic`: Topic of the group. Null: files that name no topic.
    - `day`: Day of the group, in UTC. Null: the day is not known.
    - `state`: State of the files.
    - `entries`: Number of entries.
    - `bytes`: Stored bytes.
    - `usd_a_month`: Price of storage of a month.
    - `estimated`: A file has several days, so its entries were divided evenly among them.
    """

    topic: str | UnsetType | None = UNSET
    day: str | UnsetType | None = UNSET
    state: str | UnsetType = UNSET
    entries: int
    bytes: int
    usd_a_month: float
    estimated: bool = False


class Du(Document, kw_only=True):
    """Stored entries, bytes and monthly cost.

    - `status`: Always `complete`.
    - `index_id`: Id of the index.
    - `log_number`: Number of the newest log record that the sums include.
    - `by`: Columns of the groups.
    - `prices_as_of`: Month of the prices (setting `prices.as_of`).
    - `usd_per_gib_month`: Price of storage.
    - `rows`: Sums of each group.
    - `totals`: Sums of all rows.
    """

    status: Literal["complete"] = "complete"
    index_id: str
    log_number: int
    by: list[str]
    prices_as_of: str
    usd_per_gib_month: float
    rows: list[Row]
    totals: dict[str, Any]


class Taken(Document, kw_only=True):
    """The outcome of a request that puts entries.

    - `entries`: Entries that were added.
    - `messages`: Messages that were added.
    - `source`: The parameter `source`.
    - `position`: Position of the source up to which entries were accepted.
    - `durable_position`: Position of the source up to which entries are on disk.
    - `repeated`: The index already had the source up to `position`. Nothing was added.
    """

    entries: int
    messages: int
    source: str | None = None
    position: int | None = None
    durable_position: int | None = None
    repeated: bool = False


class Verification(Document, kw_only=True):
    """A verification of the index.

    - `id`: Id of the verification.
    - `state`: `failed`: the check could not end.
    - `deep`: Whether every byte is read.
    - `begun_ms`: Time of the start, epoch milliseconds.
    - `ended_ms`: Time of the end. Null: it is running.
    - `checked`: Files or objects checked so far.
    - `doing`: The present step: `files` or `objects`.
    - `report`: The findings, at the end.
    - `problem`: Reason why the verification failed.
    """

    id: str
    state: Literal["running", "done", "failed"] = "running"
    deep: bool
    begun_ms: int
    ended_ms: int | None = None
    checked: int = 0
    doing: str = "files"
    report: dict[str, Any] | None = None
    problem: Problem | None = None


class Health(Document, kw_only=True):
    """The state of the process or of the replica.

    - `status`: `alive` (`/livez`), `ready` or `not ready` (`/readyz`).
    - `reasons`: Reasons why this replica should get no requests. If the service has tokens: only the parts that are
      not ready.
    - `problems`: Other problems, without paths. If the service has tokens: only the parts that have problems.
    """

    status: str
    reasons: list[str] | UnsetType = UNSET
    problems: list[str] | UnsetType = UNSET


class PartProblem(Document, kw_only=True):
    """A problem, and the part of the service that has it.

    - `part`: The part of the service.
    - `reason`: The problem.
    """

    part: Annotated[str, Meta(extra_json_schema={"enum": ["audit", "storage", "tokens", "writer", "source"]})]
    reason: str


class Problems(Document, kw_only=True):
    """The present problems of the service.

    - `status`: `problems` if there is one.
    - `ready`: Whether this replica should get requests.
    - `problems`: The reason of each problem, and the part of the service that has it.
    """

    status: Literal["healthy", "problems"]
    ready: bool
    problems: list[PartProblem]


class Token(Document, kw_only=True):
    """The permissions of a token.

    - `name`: Name of the token.
    - `role`: Role of the token.
    - `topics`: Prefixes of the topics that it may see. Null: every topic.
    """

    name: str
    role: Literal["read", "write", "admin"]
    topics: tuple[str, ...] | None
