"""Kafka as a connector."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tiered_index.config import IndexConfig
from tiered_index.connectors.archive.erasure import columns_to_erase
from tiered_index.connectors.contract import MessagePlaces, OpenedSource, SourceConnector, SourceRun
from tiered_index.connectors.documents import every_document, key_rules
from tiered_index.connectors.kafka.archive import EVERY_S, KafkaArchiver
from tiered_index.connectors.kafka.archived import PartitionLog, archived_logs
from tiered_index.connectors.kafka.client.broker import KafkaAddress, KafkaBroker, check_setting, read_settings
from tiered_index.connectors.kafka.client.calls import Watch
from tiered_index.connectors.kafka.columns import FORMAT
from tiered_index.connectors.kafka.keys import RecordKeys
from tiered_index.connectors.kafka.messages import KafkaMessages, parse_place
from tiered_index.connectors.kafka.names import documents_of
from tiered_index.connectors.kafka.source import KafkaSource, check_cluster, is_pattern
from tiered_index.connectors.kafka.spec import KafkaClientOptions, KafkaOptions
from tiered_index.connectors.options import pairs
from tiered_index.errors import InvalidArgument
from tiered_index.format.topic_documents import TopicDocument
from tiered_index.service.index import IndexService
from tiered_index.service.jobs.erase import EraseRequest, MakeFind
from tiered_index.service.read.answers.messages import Fetched
from tiered_index.service.read.segments.archive import SegmentArchive
from tiered_index.service.root import Root
from tiered_index.storage.disk import Disk
from tiered_index.storage.probe import AbilityFinding
from tiered_index.types import IndexItem


def client_settings(options: KafkaClientOptions) -> dict[str, str]:
    """Return the settings of Kafka's client; the command line has precedence over the file."""
    of_file = {} if options.kafka_config is None else read_settings(options.kafka_config)
    malformed = [text for text in options.kafka or () if "=" not in text]
    if malformed:
        raise InvalidArgument("write --kafka as NAME=VALUE")  # do not repeat the text: it may be a secret
    of_line = pairs("--kafka", options.kafka)
    for name in of_line:
        check_setting(name, "--kafka")
    return of_file | of_line


@dataclass(frozen=True)
class IndexRecords:
    """The records of an index: a `MessageSource`, which learns of keys that the index gets."""

    places: MessagePlaces

    def fetch(self, items: Sequence[IndexItem], topic: str, key: str) -> list[Fetched]:
        """As `KafkaMessages.fetch`."""
        return self._now().fetch(items, topic, key)

    def at(self, topic: str, partition: int, offset: int) -> Fetched:
        """As `KafkaMessages.at`."""
        return self._now().at(topic, partition, offset)

    def _now(self) -> KafkaMessages:
        places = self.places
        keys = key_rules(documents_of(every_document(places.index))) if places.index is not None else set()
        return KafkaMessages(places.archives, places.place, keys)


class KafkaConnector:
    """Follows topics of Kafka."""

    def check(self, run: SourceRun, config: IndexConfig) -> None:
        """As `SourceConnector.check`. For a new root, ask the cluster for the topics, too."""
        options: KafkaOptions = run.options or KafkaOptions()
        address, settings = KafkaAddress.parse(run.address), client_settings(options)
        RecordKeys(options.key or ("key",))
        if options.archive_every is not None and not options.archive:
            raise InvalidArgument("--archive-every needs --archive")
        if config.root is not None and address.topics and Root(config.root, Disk()).read_marker() is None:
            check_cluster(address, settings)

    def source(self, run: SourceRun, index: IndexService) -> OpenedSource:
        """As `SourceConnector.source`. Raises as `KafkaSource`."""
        options: KafkaOptions = run.options or KafkaOptions()
        source = KafkaSource(
            index,
            KafkaAddress.parse(run.address),
            client_settings(options),
            RecordKeys(options.key or ("key",)),
            run.follow,
            run.restart,
            options.restart_at,
            options.commit_group,
            run.name,
            options.drop_key or (),
            note=run.note,
        )
        every_s = EVERY_S if options.archive_every is None else options.archive_every
        return OpenedSource(source, KafkaArchiver(source, every_s=every_s) if options.archive else None, source.place)

    def doctor(self, run: SourceRun, config: IndexConfig) -> list[AbilityFinding]:
        """As `SourceConnector.doctor`: whether the cluster has the topics, and how long it keeps their records."""
        address, settings = KafkaAddress.parse(run.address), client_settings(run.options or KafkaOptions())
        check_cluster(address, settings)
        findings = [AbilityFinding("topics", "reading records", "ok", "yes")]
        settings |= {"bootstrap.servers": address.servers}
        with contextlib.closing(KafkaBroker(settings)) as broker:
            retentions = broker.retentions([topic for topic in address.topics if not is_pattern(topic)])
        for topic, retention in sorted(retentions.items()):
            of_topic = f"retention of {topic}", "archiving records before the broker deletes them"
            if isinstance(retention, str):
                unknown = f"not known, so records are archived every hour: {retention}"
                findings.append(AbilityFinding(*of_topic, "worked round", unknown))
            else:
                age = "no limit of age" if retention.age_ms is None else f"{retention.age_ms / 3_600_000:,.1f} hours"
                size = "" if retention.size_bytes is None else f", {retention.size_bytes:,} bytes a partition"
                findings.append(AbilityFinding(*of_topic, "ok", age + size))
        return findings

    @contextlib.contextmanager
    def watch(self, tell: Callable[[str], None]) -> Iterator[Callable[[], list[str]]]:
        """End the process if a client of Kafka does not return from a call; see `Watch`."""
        with Watch(tell) as watch:
            yield watch.problems

    def place(self, options: KafkaClientOptions | None, address: str | None = None) -> KafkaBroker | None:
        """Return the brokers of an address, or those of the setting ``bootstrap.servers``; None: there is neither."""
        settings = client_settings(options or KafkaClientOptions())
        if address is not None:
            settings |= {"bootstrap.servers": KafkaAddress.parse(address).servers}
        return KafkaBroker(settings) if "bootstrap.servers" in settings else None

    def parse_place(self, text: str) -> tuple[str, int, int]:
        """As `Connector`: topic, partition and offset."""
        return parse_place(text)

    def messages(self, places: MessagePlaces) -> IndexRecords:
        """As `Connector.messages`."""
        return IndexRecords(places)

    def archived_logs(self, archive: SegmentArchive, takes: Callable[[str], bool]) -> list[PartitionLog]:
        """As `Connector.archived_logs`."""
        return archived_logs(archive, takes)

    def erasure(self, request: EraseRequest, document: TopicDocument | None) -> MakeFind:
        """As `Connector.erasure`."""
        return columns_to_erase(FORMAT, request, key_rules(documents_of([document])))


CONNECTOR: SourceConnector = KafkaConnector()
