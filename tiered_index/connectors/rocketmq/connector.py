"""RocketMQ's stores as a connector."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from tiered_index.config import IndexConfig
from tiered_index.connectors.contract import MessagePlaces, OpenedSource, Repairing, SourceConnector, SourceRun
from tiered_index.connectors.documents import document_of
from tiered_index.connectors.rocketmq.archive.archive import SegmentArchiver
from tiered_index.connectors.rocketmq.archive.erasure import MessagesToErase
from tiered_index.connectors.rocketmq.archive.messages import RocketmqMessages
from tiered_index.connectors.rocketmq.archive.repair import StoreSegments
from tiered_index.connectors.rocketmq.follow.dispatcher import Dispatcher, names_of_keys
from tiered_index.connectors.rocketmq.log.columns import Selection
from tiered_index.connectors.rocketmq.log.commitlog import CommitLogReader
from tiered_index.connectors.rocketmq.log.layout import decode_offset_msg_id
from tiered_index.connectors.rocketmq.log.store import StoreDirectory, check_apart, unreadable_queues
from tiered_index.connectors.rocketmq.spec import ArchiveOptions, RocketmqOptions, folder_of
from tiered_index.format.topic_documents import TopicDocument
from tiered_index.service.index import IndexService
from tiered_index.service.jobs.erase import EraseRequest, MakeFind
from tiered_index.storage.probe import AbilityFinding


def _store_of(run: SourceRun, options: RocketmqOptions) -> StoreDirectory:
    return StoreDirectory.open(folder_of(run.address), run.name, options.of_store.commitlog or ())


class RocketmqConnector:
    """Follows the commit log of a store."""

    def check(self, run: SourceRun, config: IndexConfig) -> None:
        """As `SourceConnector.check`. The root and a local storage must be apart from the broker's folders."""
        options: RocketmqOptions = run.options or RocketmqOptions()
        check_apart(config, folder_of(run.address), *(options.of_store.commitlog or ()))
        _store_of(run, options)
        Selection(*options.selected.arguments)

    def source(self, run: SourceRun, index: IndexService) -> OpenedSource:
        """As `SourceConnector.source`. Raises as `Dispatcher`."""
        options: RocketmqOptions = run.options or RocketmqOptions()
        store, of_store = _store_of(run, options), options.of_store
        selection = Selection(*options.selected.arguments)
        source = Dispatcher(
            index,
            store,
            follow=run.follow,
            restart=run.restart,
            skip_corrupt=of_store.skip_corrupt,
            skip_missing=of_store.skip_missing,
            stopping=run.stopped,
            reader=CommitLogReader(store.commitlog, check_crc=of_store.check_bodies, selection=selection),
        )
        if source.selected_before is not None:
            run.note(
                f"from commit log offset {source.position} on, this run indexes {source.fingerprints.selection}; "
                f"earlier runs indexed {source.selected_before}: --restart reads the log from its start"
            )
        archiver = None
        if options.archiving != ArchiveOptions():
            archiver = SegmentArchiver(
                index,
                store.name,
                store.commitlog,
                skip_corrupt=of_store.skip_corrupt,
                dispatcher=source,
                queues=options.archiving.archive_queues,
            )
        return OpenedSource(source, archiver, store.source)

    def doctor(self, run: SourceRun, config: IndexConfig) -> list[AbilityFinding]:
        """As `SourceConnector.doctor`: the commit log, and the consume queues of the store."""
        store = _store_of(run, run.options or RocketmqOptions())
        segments = CommitLogReader(store.commitlog).segments()
        count = f"yes: {len(segments):,} segments" if segments else "it has no segment yet"
        findings = [AbilityFinding("commit log", "reading messages", "ok", count)]
        of_queues = "consume queues", "queue offsets: browsing, and RocketMQ's tools"
        if (problem := unreadable_queues(store.folder)) is None:
            findings.append(AbilityFinding(*of_queues, "ok", "yes"))
        else:
            slower = f"{problem}: queue offsets are read from the messages, once a segment"
            findings.append(AbilityFinding(*of_queues, "worked round", slower))
        return findings

    def repairs(self, run: SourceRun | None) -> Repairing:
        """As `SourceConnector`: a store has the bytes of its archived segments."""
        store = None if run is None else _store_of(run, run.options or RocketmqOptions())
        return partial(StoreSegments, store=store)

    def watch(self, tell: Callable[[str], None]) -> AbstractContextManager[Callable[[], list[str]]]:
        """Nothing can hang the process: a store is read as files."""
        return contextlib.nullcontext(list)

    def place(self, options: object, address: str | None = None) -> Path | None:
        """Return the folder of the store at an address. Raises `InvalidArgument` if it is not one."""
        return None if address is None else StoreDirectory.open(folder_of(address)).folder

    def check_id(self, text: str) -> None:
        """As `Connector`: ids of messages name a broker and an offset of its log."""
        decode_offset_msg_id(text)

    def messages(self, places: MessagePlaces) -> RocketmqMessages:
        """As `Connector.messages`. Raises `InvalidArgument` for a store beside several indexes."""
        documents = places.documents if places.index is not None else None
        of_index: dict[str, Any] = {"threads": places.config.query_threads, "root": places.config.root}
        return RocketmqMessages(places.place, places.archives, **of_index, documents=documents)

    def document_again(self, document: TopicDocument, options: RocketmqOptions) -> TopicDocument:
        """As `Connector`: whether tags are keys is up to the options."""
        facts = {name: fact for name, fact in document.facts.items() if name != "key_names"}
        return document_of("rocketmq", facts | names_of_keys(has_tags=options.selected.index_tags))

    def erasure(self, request: EraseRequest, document: TopicDocument | None) -> MakeFind:
        """As `Connector.erasure`."""
        return partial(MessagesToErase, request)


CONNECTOR: SourceConnector = RocketmqConnector()
