"""Models of the service's answers. `description` describes answers by them, and their docstrings the members.

The answers of lookups are documents of the library (`to_dict`), which are faster to encode than a model: a test
compares their members. The service makes its other answers as these models. Threads: any.

A model has the name of the document that it describes, because the description (OpenAPI) publishes this name: clients
are made from it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from tiered_index.types import FileReport, Freshness, IndexItem, LostFile, TopicSummary


class Document(Struct, kw_only=True):
    """An answer, or a part of one. A member is in every document, unless it may be UNSET."""

    def to_dict(self) -> dict[str, Any]:
        """Return the document, JSON-ready."""
        return msgspec.to_builtins(self)  # type: ignore[no-any-return]


class Explain(Document, kw_only=True):
    """The cost of a lookup, or of all lookups of a batch.

    - `requests`: Requests to the storage.
    - `bytes`: Bytes read from the storage.
    - `cost_usd`: Estimated cost of requests and traffic, by the setting `prices`.
    - `elapsed_ms`: Wall time.
    - `files_read`: Files that were read.
    - `files_skipped`: Files that were not read.
    - `files`: A report for each file, with `explain=true`.
    - `folded_entries`: Entries left out because another entry of the answer has the same topic, queue and offset,
      but other content. If it is not 0, different messages share an offset.
    - `message_requests`: Requests for messages. `requests` includes them.
    - `message_bytes`: Bytes of messages. `bytes` includes them.
    """

    requests: int = 0
    bytes: int = 0
    cost_usd: float = 0.0
    elapsed_ms: float
    files_read: int = 0
    files_skipped: int = 0
    files: list[FileReport] | UnsetType = UNSET
    folded_entries: int = 0
    message_requests: int | UnsetType = UNSET
    message_bytes: int | UnsetType = UNSET


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


class Answer(Document, kw_only=True):
    """The members that every answer of lookups has.

    - `status`: `complete`; `truncated`: continue with `cursor`; `partial`: `failed` names the files that the answer
      lacks.
    - `failed`: Files that could not be read. Without `allow_partial` only folders that the service's user may not
      read, below a prefix of several indexes.
    - `unknown_topics`: Has the topic if no file in the time range has it. Otherwise empty.
    - `as_of_ms`: Time of the newest published entry outside the quarantine, or of the last upload if that is
      earlier. For topics of Kafka also no later than the time up to which every partition was read; 0: never to the
      end. With several indexes or topics, the earliest of their times. The answer may lack earlier entries that
      were published later. Null: none was published, or `freshness` is empty.
    - `freshness`: The state of each index that was read from its storage, or whose source is behind for the topic.
    - `lost`: Lost files that may have had entries of the answer.
    - `expired_before_ms`: Entries before this time have expired. Null: nothing expired in the range.
    """

    status: Literal["complete", "truncated", "partial"] = "complete"
    failed: list[FileReport] = []
    explain: Explain
    unknown_topics: list[str] = []
    as_of_ms: int | None = None
    freshness: list[Freshness] = []
    lost: list[LostFile] = []
    expired_before_ms: int | None = None


class QueryResult(Answer, kw_only=True):
    """The answer to the lookup of one key.

    - `items`: Entries, the newest first.
    - `cursor`: Continues a truncated answer. Null: there is no more.
    - `timestamp_resolution_ms`: Resolution of times: 1,000.
    """

    items: list[IndexItem]
    cursor: str | None = None
    timestamp_resolution_ms: int = 1000


class BatchAnswer(Document, kw_only=True):
    """The answer to one lookup of a batch. The batch has the other members of an answer.

    - `items`: Entries, the newest first.
    - `status`: `complete`; `truncated`: continue with `cursor`; `partial`: `failed` names the files that the answer
      lacks.
    - `cursor`: Continues a truncated answer. Null: there is no more.
    - `unknown_topics`: Has the topic if no file in the time range has it. Otherwise empty.
    - `expired_before_ms`: Entries before this time have expired. Null: nothing expired in the range.
    - `failed`: Files that could not be read.
    - `lost`: Lost files that may have had entries of the answer.
    """

    items: list[IndexItem]
    status: Literal["complete", "truncated", "partial"] = "complete"
    cursor: str | None = None
    unknown_topics: list[str] = []
    expired_before_ms: int | None = None
    failed: list[FileReport] | UnsetType = UNSET
    lost: list[LostFile] | UnsetType = UNSET


class QueryResults(Answer, kw_only=True):
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
    cursors: dict[str, str] = {}
    partial: list[int] = []
    timestamp_resolution_ms: int = 1000
    exceeded: str | UnsetType = UNSET


class TopicsResult(Answer, kw_only=True):
    """The topics of the index.

    - `topics`: A summary of each topic.
    - `status`: `partial`: `failed` names the files that the answer lacks. Otherwise `complete`.
    - `unknown_topics`: Always empty, since the request names no topic.
    """

    topics: list[TopicSummary]


class FetchedMessage(Document, kw_only=True):
    """An entry and its message.

    - `state`: Place of the message, or reason why there is none.
    - `item`: The entry. Null: the request named a place.
    - `message`: The message. Null: there is none.
    - `read_from`: File or address from which the message was read.
    - `problem`: Reason why the message could not be read.
    """

    state: Literal["local", "archived", "expired", "erased", "no_topic", "refused", "unavailable", "missing"]
    item: IndexItem | None
    message: dict[str, Any] | None
    read_from: str | None
    problem: str | None


class MessagesResult(Answer, kw_only=True):
    """The answer to a lookup of messages.

    - `messages`: Entries (`item`), each with its message. `state` is `local`, `archived`, `expired`, `erased`,
      `no_topic`, `refused`, `unavailable` or `missing` (`problem` states the reason). `expired`: the broker deleted
      the message before it was archived. `no_topic`: the broker has no such topic. `refused`: the broker does not
      let the service read it. `unavailable`: the broker does not answer, or can't return it yet.
    - `cursor`: Continues a truncated answer. Null: there is no more.
    - `collisions`: Entries left out because their messages have another key with the same hash, or lack the text
      `contains`.
    """

    messages: list[FetchedMessage]
    cursor: str | None = None
    collisions: int


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
