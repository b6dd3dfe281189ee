"""Reads the Kafka records of an answer, or one by its place: from the broker if it has them, otherwise the archive.

A record belongs to an entry if place, size and second agree, and one of its keys is the key of the lookup. Its keys are
found as for the index: the index's positions name the rule, and so does each archived file. If a record at an entry's
place contradicts the entry, it is from another log of the partition. Threads: any.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import pyarrow as pa

from tiered_index.base.threads import each
from tiered_index.base.units import MAX_TIMESTAMP_MS
from tiered_index.connectors.archive.columns import CLOCK_STEP_S, ArchivedRecord, ArchiveSearch, read_archived
from tiered_index.connectors.documents import key_rules
from tiered_index.connectors.kafka.client.broker import Deleted, KafkaBroker, NoTopic
from tiered_index.connectors.kafka.columns import keys_in_notes, keys_of_rows, records_of
from tiered_index.connectors.kafka.keys import FUNCTION, KeyFunction, RecordKeys
from tiered_index.connectors.kafka.names import documents_of
from tiered_index.connectors.kafka.record import KafkaRecord
from tiered_index.connectors.kafka.spec import SPEC
from tiered_index.errors import (
    BudgetExceeded,
    CorruptFile,
    InvalidArgument,
    StorageError,
    StorageMisconfigured,
    StorageUnavailable,
)
from tiered_index.format.segments.columnar import notes_of
from tiered_index.format.topic_documents import newest_of
from tiered_index.service.read.answers.messages import Fetched, MessageState
from tiered_index.service.read.segments.archive import SegmentArchive
from tiered_index.types import IndexItem

_PLACE = re.compile(r"kafka:([^/\0]+)/([0-9]{1,19})/([0-9]{1,19})")
# Kafka's partitions have 32 bits, and its offsets 64
_MOST_PARTITION, _MOST_OFFSET = 2**31 - 1, 2**63 - 1


def parse_place(text: str) -> tuple[str, int, int]:
    """Return topic, partition and offset of ``kafka:TOPIC/PARTITION/OFFSET``. Raises `InvalidArgument`."""
    if (place := _PLACE.fullmatch(text)) is not None:
        topic, partition, offset = place[1], int(place[2]), int(place[3])
        if partition <= _MOST_PARTITION and offset <= _MOST_OFFSET:
            return topic, partition, offset
    raise InvalidArgument(f"write a record's place as kafka:TOPIC/PARTITION/OFFSET, not {text!r:.200}")


@dataclass(slots=True, kw_only=True)
class RecordSearch(ArchiveSearch):
    """The search for the record of one place, and of its entry if there is one."""

    place: tuple[str, int, int]
    key: str | None = None

    def take(self, record: KafkaRecord, state: MessageState, carries: Callable[[KafkaRecord, str], bool]) -> None:
        """Judge a record that was read at the place."""
        item, second = self.item, None if record.timestamp_ms is None else _second(record.timestamp_ms)
        if (record.topic, record.partition, record.offset) != self.place:
            self.problems.append(f"{self.read_from}: a record of another place is there")
            return
        carried = self.key is None or carries(record, self.key)
        if item is not None and not (
            record.size == (item.size or record.size)
            and (second is None or abs(second - item.timestamp_ms // 1000) <= CLOCK_STEP_S)
        ):
            self.problems.append(f"{self.read_from}: another record is there: the log is another one")
            if carried and second is not None:
                self.instead = self.instead or replace(item, size=record.size, timestamp_ms=second * 1000)
            return
        self.settle(self.fetched(state, message=record, carries_key=carried))


def _second(timestamp_ms: int) -> int:
    return min(timestamp_ms, MAX_TIMESTAMP_MS) // 1000


@dataclass(eq=False)
class KafkaMessages:
    """The records of indexes: a `MessageSource`.

    - `archives`: those of the indexes, by the `source` of their entries, as `IndexReader.segment_archives`.
    - `broker`: that of one cluster. None: records come only from the archives.
    - `keys`: the rules of `--key`, in addition to those in the archives.
    - `function`: returns the keys of records, for an index that was made with a function.
    """

    archives: Mapping[str | None, SegmentArchive]
    broker: KafkaBroker | None = None
    keys: Iterable[str] = ()
    function: KeyFunction | None = None
    threads: int = 8

    def fetch(self, items: Sequence[IndexItem], topic: str, key: str) -> list[Fetched]:
        """Return what became of each of `items`, in their order. Errors of places are in the answers."""
        searches = [self._search((topic, item.queue_id, item.offset), key, item) for item in items]
        each(searches, self._settle, self.threads)
        return [search.result() for search in searches]

    def at(self, topic: str, partition: int, offset: int) -> Fetched:
        """Return the record at an offset of a partition. Raises what made the place impossible to ask."""
        search = self._search((topic, partition, offset))
        self._settle(search)
        if (fetched := search.result()).error is not None:
            raise fetched.error
        return fetched

    def close(self) -> None:
        """Leave the cluster."""
        if self.broker is not None:
            self.broker.close()

    def _search(
        self, place: tuple[str, int, int], key: str | None = None, item: IndexItem | None = None
    ) -> RecordSearch:
        search = RecordSearch(item=item, place=place, key=key)
        if self.broker is None:
            search.no_archive = SPEC.words.no_message
        return search

    def _settle(self, search: RecordSearch) -> None:
        sources = [search.item.source] if search.item is not None else list(self.archives)
        archives = [self.archives[source] for source in sources if source in self.archives]
        documents = [newest_of(search.place[0], [archive.state().documents]) for archive in archives]
        rules = {*self.keys, *key_rules(documents_of(documents))}
        if self.broker is not None:
            self._ask_broker(self.broker, search, rules)
        for archive in archives:
            if search.found is None:
                self._read_archive(archive, search, rules)

    def _ask_broker(self, broker: KafkaBroker, search: RecordSearch, rules: set[str]) -> None:
        search.read_from = "{}/{}/{}".format(broker.place, *search.place[:2])
        try:
            record = broker.record(*search.place)
        except Deleted as error:
            search.state = "expired"
            search.problems.append(f"the broker has deleted it: {error}")
        except NoTopic as error:
            search.state = "no_topic"
            search.problems.append(str(error))
        except (CorruptFile, StorageError, BudgetExceeded) as error:
            if isinstance(error, StorageMisconfigured):
                search.state = "refused"
            elif isinstance(error, StorageUnavailable):
                search.state = "unavailable"
            search.problems.append(str(error))
            search.error = error if not isinstance(error, CorruptFile) else None
        else:
            if record is None:
                search.problems.append(f"{search.read_from} has no record at offset {search.place[2]:,}")
            else:
                search.take(record, "local", partial(self._carries, rules))

    def _read_archive(self, archive: SegmentArchive, search: RecordSearch, rules: set[str]) -> None:
        """Look into the archived logs of a partition, the newest first."""

        def take(record: ArchivedRecord) -> None:
            of_file = keys_in_notes(notes_of(record.footer))
            carries = partial(self._archived_carries, record.row, of_file, rules)
            search.take(records_of(record.row)[0], "archived", carries)

        read_archived(archive, "kafka:", search.place, search, take)

    def _archived_carries(
        self, row: pa.Table, of_file: list[str], rules: set[str], record: KafkaRecord, key: str
    ) -> bool:
        if key in keys_of_rows(row, of_file, rules)[0]:
            return True
        # the file has all keys of a function that was known when it was written
        return FUNCTION not in of_file and self._carries(rules, record, key)

    def _carries(self, rules: set[str], record: KafkaRecord, key: str) -> bool:
        if key in RecordKeys.by_rules(rules).of(record):
            return True
        if FUNCTION in rules and self.function is None:
            raise InvalidArgument("the keys of this index are those of a function: pass it to KafkaMessages(function=)")
        return self.function is not None and key in self.function(record)
