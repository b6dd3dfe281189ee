"""What documents of topics say: the connector that wrote a topic, its words, and its rules of keys. Threads: any.

The facts of a document are its connector's own, but for these:

- `keys`: the rules by which messages have keys, or had, as `tiered_index.format.keys.spelling.split_name` reads them.
- `key_names`: what further keys begin with, such as those of tags.
- `times`: how times of rows are read, by the path of the time; see `times_in`.
- `store`: the store of the topic's log, if several topics may share it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from tiered_index.connectors.registry import CONNECTORS, OTHER, Words
from tiered_index.errors import ConfigError
from tiered_index.format.topic_documents import OUR_PACKAGE, TopicDocument

if TYPE_CHECKING:
    from tiered_index.service.index import IndexService
    from tiered_index.service.reader import IndexReader


def document_of(connector: str, facts: Mapping[str, Any] | None = None) -> TopicDocument:
    """Return the document of topics that a connector writes. Raises `ConfigError` if it is not installed."""
    spec = CONNECTORS.spec(connector)
    return TopicDocument.of(connector, spec.version, facts, CONNECTORS.package(connector))


def words_of(document: TopicDocument | None) -> Words:
    """Return the words for a topic with this document; None: a program put its entries, or there are none."""
    if document is None or CONNECTORS.has(document.connector):
        return words_of_connector(None if document is None else document.connector)
    return OTHER._replace(no_message=lacking(document) or OTHER.no_message)


def words_of_connector(name: str | None) -> Words:
    """Return the words of a connector by its name; None, or one that is not installed: general ones."""
    return CONNECTORS.spec(name).words if name is not None and CONNECTORS.has(name) else OTHER


def lacking(document: TopicDocument) -> str | None:
    """Return why no messages of a topic can be read here, with the advice; None: its connector can read them."""
    try:
        CONNECTORS.connector(document.connector)
    except ConfigError as error:
        package = document.package or f"that has the connector {document.connector!r}"
        problem = str(error) if CONNECTORS.is_installed(document.connector) else f"install the package {package}"
        return f"the connector {document.connector!r} wrote this topic: {problem}"
    if document.version > (known := CONNECTORS.spec(document.connector).version):
        return (
            f"the connector {document.connector!r} wrote this topic with version {document.version} of its facts, and "
            f"the installed one knows version {known}: update the package {document.package or OUR_PACKAGE}"
        )
    return None


def key_rules(documents: Iterable[TopicDocument]) -> set[str]:
    """Return the rules by which messages of topics with these documents have keys, or had."""
    return {rule for document in documents for rule in document.key_rules}


def every_document(index: IndexReader[Any] | IndexService[Any]) -> Iterator[TopicDocument]:
    """Yield the documents of all topics, of a reader of several indexes those of each index."""
    for documents in index.documents_of_indexes().values():
        yield from documents.values()


def of_store(documents: Iterable[TopicDocument], store: str) -> TopicDocument | None:
    """Return the document of a topic whose log is in a store; None: there is none."""
    return next((document for document in documents if document.facts.get("store") == store), None)


def times_in(document: TopicDocument | None) -> Mapping[str, Mapping[str, str]]:
    """Return how times of rows are read, by their path: `unit` of numbers, `zone` of times that have none."""
    return {} if document is None else document.facts.get("times", {})


def with_times(document: TopicDocument | None, path: str, unit: str | None, zone: str | None) -> dict[str, Any]:
    """Return `times_in` a document with the unit and the zone of times at a path; None: it stays as it is."""
    known = times_in(document)
    read = {name: value for name, value in (("unit", unit), ("zone", zone)) if value is not None}
    return {**known, path: {**known.get(path, {}), **read}} if read else {**known}
