"""Kafka as a connector."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from tiered_index.config import IndexConfig
from tiered_index.connectors.contract import Connector, OpenedSource, SourceRun
from tiered_index.connectors.kafka.archive import EVERY_S, KafkaArchiver
from tiered_index.connectors.kafka.client.broker import KafkaAddress, check_setting, read_settings
from tiered_index.connectors.kafka.client.calls import Watch
from tiered_index.connectors.kafka.keys import RecordKeys
from tiered_index.connectors.kafka.source import KafkaSource, check_cluster
from tiered_index.connectors.kafka.spec import KafkaClientOptions, KafkaOptions
from tiered_index.connectors.options import pairs
from tiered_index.errors import InvalidArgument
from tiered_index.service.index import IndexService
from tiered_index.service.root import Root
from tiered_index.storage.disk import Disk


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


class KafkaConnector:
    """Follows topics of Kafka."""

    def check(self, run: SourceRun, config: IndexConfig) -> None:
        """As `Connector.check`; for a new root, also a cluster that does not answer and missing topics are errors."""
        options: KafkaOptions = run.options or KafkaOptions()
        address, settings = KafkaAddress.parse(run.address), client_settings(options)
        RecordKeys(options.key or ("key",))
        if options.archive_every is not None and not options.archive:
            raise InvalidArgument("--archive-every needs --archive")
        if config.root is not None and address.topics and Root(config.root, Disk()).read_marker() is None:
            check_cluster(address, settings)

    def source(self, run: SourceRun, index: IndexService) -> OpenedSource:
        """As `Connector.source`. Raises as `KafkaSource`."""
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

    @contextlib.contextmanager
    def watch(self, tell: Callable[[str], None]) -> Iterator[Callable[[], list[str]]]:
        """End the process if a client of Kafka does not return from a call; see `Watch`."""
        with Watch(tell) as watch:
            yield watch.problems


CONNECTOR: Connector = KafkaConnector()
