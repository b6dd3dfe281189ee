"""Documents of topics: which connector wrote the entries of a topic, and what it noted. SPEC.md section 9. Pure.

A topic has one document, of which the newest revision counts. An entry that a program put needs none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta, Struct

from tiered_index.base.documents import Count, encoded, typed
from tiered_index.errors import InvalidArgument
from tiered_index.format.keys.spelling import split_name

OUR_PACKAGE = "tiered-index"
"""The package that has a connector whose document names none."""
MOST_BYTES = 4096
"""Most bytes of a document, as JSON."""
_CONNECTOR = r"\A[a-z][a-z0-9_-]{0,63}\Z"


class _Facts(Struct):
    """The facts that mean the same for all connectors."""

    keys: tuple[str, ...] = ()
    key_names: tuple[str, ...] = ()
    store: str = ""


class TopicDocument(Struct, frozen=True, omit_defaults=True):
    """Says which connector wrote the entries of a topic, and in which version of its facts.

    `facts` are the connector's own, such as the names of keys. `package` is what to install for the connector; empty:
    nothing else. Use `of` to make one. Immutable, like its facts.
    """

    connector: Annotated[str, Meta(pattern=_CONNECTOR)]
    version: Count
    facts: dict[str, Any] = msgspec.field(default_factory=dict)
    package: str = ""

    def __post_init__(self) -> None:
        if (size := len(self.encoded)) > MOST_BYTES:
            raise ValueError(f"the document of a topic has {size:,} bytes: at most {MOST_BYTES:,} are possible")
        typed(self.facts, _Facts)

    @classmethod
    def of(
        cls, connector: str, version: int, facts: Mapping[str, Any] | None = None, package: str = ""
    ) -> TopicDocument:
        """Return a document. Raises `InvalidArgument` for a wrong name, facts that are no JSON, or above 4 KiB."""
        try:
            # as it will be read again: a tuple becomes a list
            stated = {"connector": connector, "version": version, "facts": dict(facts or {}), "package": package}
            return msgspec.json.decode(encoded(stated), type=cls)
        except (ValueError, TypeError, RecursionError) as error:
            raise InvalidArgument(f"the document of a topic is invalid: {error}") from error

    @property
    def key_rules(self) -> list[str]:
        """The rules by which messages have keys, or had, as of `split_name`."""
        return list(self.facts.get("keys", ()))

    @property
    def key_names(self) -> tuple[str, ...]:
        """What keys with a name begin with, sorted: the names of rules, and those that the connector gives."""
        names = [name for name, _ in map(split_name, self.key_rules)]
        return tuple(sorted({*filter(None, names), *self.facts.get("key_names", ())}))

    @property
    def encoded(self) -> bytes:
        """The document as JSON, equal for equal documents."""
        return encoded(self, is_sorted=True)


def names_of_keys(documents: Iterable[TopicDocument]) -> tuple[str, ...]:
    """Return what keys with a name begin with by any of these documents, sorted."""
    return tuple(sorted({name for document in documents for name in document.key_names}))


DocumentOf = Callable[[str], TopicDocument | None]
"""Returns the document of a topic; None: it has none. Returns the same object as long as nothing changes."""


class Revision(NamedTuple):
    """A revision of a topic's document. `number` counts them, from 1."""

    number: int
    document: TopicDocument


Documents = Mapping[str, Revision]
"""The newest known revision of each topic's document, by topic."""
NO_DOCUMENTS: Documents = {}


class StoredDocument(Struct, frozen=True):
    """A document as files and records have it, with the topics that share it, and the number of each one's revision."""

    document: TopicDocument
    topics: dict[str, Annotated[int, Meta(ge=1, le=2**63 - 1)]]

    @property
    def revisions(self) -> dict[str, Revision]:
        """The revision of each topic."""
        return {topic: Revision(number, self.document) for topic, number in self.topics.items()}


StoredDocuments = tuple[StoredDocument, ...]


def stored_documents(documents: Documents) -> list[dict[str, Any]]:
    """Return documents as JSON to store: each different one once, with its topics."""
    shared: dict[bytes, tuple[TopicDocument, dict[str, int]]] = {}
    # most topics share one object
    keys: dict[int, bytes] = {}
    for topic, (number, document) in documents.items():
        key = keys.get(id(document)) or keys.setdefault(id(document), document.encoded)
        shared.setdefault(key, (document, {}))[1][topic] = number
    return [{"document": document, "topics": topics} for document, topics in shared.values()]


def documents_in(stored: Iterable[StoredDocument]) -> dict[str, Revision]:
    """Return the documents of topics as they are stored."""
    return {topic: revision for shared in stored for topic, revision in shared.revisions.items()}


def newest_documents(first: Documents, second: Documents) -> Documents:
    """Return the newest revision of each topic; of two of one number, that of `second`."""
    return {**first, **missing_documents(second, first)} if second else first


def revised(documents: Documents) -> dict[str, TopicDocument]:
    """Return the document of each topic."""
    return {topic: revision.document for topic, revision in documents.items()}


def connectors_in(documents: Documents) -> frozenset[str]:
    """Return the connectors that wrote topics."""
    return frozenset(revision.document.connector for revision in documents.values())


def newest_of(topic: str, known: Iterable[Documents]) -> TopicDocument | None:
    """Return the newest document of a topic, of several maps of one index, as `newest_documents`; None: it has none."""
    revisions = [documents[topic] for documents in known if topic in documents]
    return max(reversed(revisions), key=lambda revision: revision.number).document if revisions else None


def new_revisions(known: Documents, described: Mapping[str, TopicDocument]) -> dict[str, Revision]:
    """Return the next revision of each topic that has another document than `described`, or none.

    Raises `InvalidArgument` if another connector wrote a topic: its messages would be looked for in the wrong place.
    Also if a newer version did: this one may not know all facts, which would be lost.
    """
    for topic, document in described.items():
        if (before := known.get(topic)) is not None and before.document.connector != document.connector:
            raise InvalidArgument(
                f"topic {topic!r} has entries of the connector {before.document.connector!r}, and a topic has one "
                f"connector: put those of {document.connector!r} under another topic, or into another index"
            )
        if before is not None and before.document.version > document.version:
            raise InvalidArgument(
                f"a newer version of the connector {document.connector!r} wrote topic {topic!r}: update the package "
                f"{before.document.package or OUR_PACKAGE}"
            )
    return {
        topic: Revision(before.number + 1 if before is not None else 1, document)
        for topic, document in described.items()
        if (before := known.get(topic)) is None or (before.document is not document and before.document != document)
    }


def missing_documents(documents: Documents, known: Documents) -> dict[str, Revision]:
    """Return those of `documents` that are not older than the `known` ones of their topics, and differ from them."""
    return {
        topic: revision
        for topic, revision in documents.items()
        if (other := known.get(topic)) is None or (revision.number >= other.number and revision != other)
    }


def in_parts(documents: Documents, most_bytes: int) -> list[dict[str, Revision]]:
    """Return documents in one or more parts, each of at most about `most_bytes` as JSON."""
    parts, size = [dict[str, Revision]()], 0
    before = None
    for topic, revision in sorted(documents.items(), key=lambda pair: id(pair[1].document)):
        size += 32 + 6 * len(topic) + (0 if revision.document is before else MOST_BYTES)
        if size > most_bytes and parts[-1]:
            parts.append({})
            size = 32 + 6 * len(topic) + MOST_BYTES
        parts[-1][topic] = revision
        before = revision.document
    return parts
