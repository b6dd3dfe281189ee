"""Archived files of Kafka's records, for tests."""

from collections.abc import Sequence

import pyarrow as pa

from tiered_index.connectors.kafka.client.broker import Place
from tiered_index.connectors.kafka.columns import FORMAT, archived_table, notes_of_records


def encode_records(place: Place, records: pa.Table, rules: Sequence[str]) -> bytes:
    """Return the file of records of one partition; its footer has the rules of their keys."""
    return FORMAT.encode(archived_table(place, records), notes_of_records(rules))
