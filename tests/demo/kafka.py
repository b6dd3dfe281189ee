"""`python -m tests.demo.kafka`: follow topics of Kafka into an index and its archive, kill the follower, and find all
records again.

They are also found once the broker has deleted them. librdkafka's mock cluster is the broker. Each record has a key (a
customer), a header (a trace) and JSON (an order). All three are keys of the index. Every record is looked up by its
trace afterwards.
"""

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from typer import Option

from tests.demo.command import LOOKUP_COLUMNS, demo_place, lookup_cells, refuse_places, told_times, write_end
from tests.demo.processes import ProcessFailed
from tests.demo.workload import Measured
from tests.support.kafka_cluster import PARTITIONS, Cluster, Producing, kafka_cluster
from tests.support.processes import started
from tiered_index.cli.declaring import command
from tiered_index.cli.main import alone, run
from tiered_index.cli.output import Output, human_count, human_seconds
from tiered_index.cli.session import Session
from tiered_index.config import IndexConfig
from tiered_index.connectors.kafka.client.broker import KafkaBroker
from tiered_index.connectors.kafka.messages import KafkaMessages
from tiered_index.connectors.kafka.record import KafkaRecord
from tiered_index.service.reader import IndexReader
from tiered_index.types import Lookup

TOPICS = ("orders", "payments")
KEYS = ("key", "header:trace", "json:order.id")
BEGIN_MS = 1_762_000_000_000
ASKED = "order-4711"
_LOOKUPS, _LOOKUPS_AT_ONCE = 200, 10_000
_WRONG = 1


@dataclass(frozen=True)
class Record:
    """The record of a number: an order has one in each topic, of one customer."""

    number: int

    @property
    def topic(self) -> str:
        return TOPICS[self.number % 2]

    @property
    def place(self) -> tuple[int, int]:
        """Its partition and offset."""
        order = self.number // 2
        return order % PARTITIONS, order // PARTITIONS

    @property
    def keys(self) -> tuple[str, str, str]:
        """Its keys, in the order of `KEYS`."""
        order = self.number // 2
        return f"customer-{order * 7919 % 997}", f"trace-{self.number}", f"order-{order}"

    @property
    def value(self) -> bytes:
        order = {"id": self.keys[2], "total": self.number % 900}
        return json.dumps({"order": order, "state": ("placed", "paid")[self.number % 2]}).encode()

    def produced(self) -> dict[str, Any]:
        """Return the arguments of the producer."""
        customer, trace, _ = self.keys
        time_ms = BEGIN_MS + self.number * 10
        headers = [("trace", trace)]
        about = {"key": customer, "value": self.value, "partition": self.place[0]}
        return {**about, "headers": headers, "timestamp": time_ms}


def produce(servers: str, first: int, last: int) -> None:
    """Write the records of these numbers."""
    producing = Producing(servers)
    for topic in range(2):
        records = (Record(n) for n in range(first, last) if n % 2 == topic)
        producing.send(TOPICS[topic], (record.produced() for record in records))


@dataclass
class Stages:
    """One run of the demo."""

    cluster: Cluster
    config: IndexConfig
    records: int
    lookups: int
    say: Any
    figures: dict[str, Any] = field(default_factory=dict)

    def follow_and_die(self) -> None:
        """Follow while records arrive, kill the follower, and run the same command again, to the end of the topics."""
        half = self.records // 2
        produce(self.cluster.servers, 0, half)
        self.say(f"{half:,} records in {len(TOPICS)} topics of {PARTITIONS} partitions; the follower begins")
        writing = threading.Thread(target=produce, args=(self.cluster.servers, half, self.records))
        begun, killed_at = 0, 0
        with self._ingest("--follow") as follower:
            assert follower.stdout is not None
            for line in follower.stdout:
                killed_at = json.loads(line)["position"]
                if not begun and (begun := killed_at):
                    writing.start()
                elif killed_at > begun:
                    follower.kill()
            writing.join()
            if follower.wait() != -9:
                assert follower.stderr is not None
                raise ProcessFailed(f"ingest ended by itself: {follower.stderr.read().strip()}")
        self.say(f"SIGKILL at {killed_at:,} records, while others arrive")
        with self._ingest("--wait") as again:
            output, errors = again.communicate()
        if again.returncode:
            raise ProcessFailed(f"ingest ended with exit code {again.returncode}: {errors}")
        done = json.loads(output)
        self.figures |= {name: done[name] for name in ("resumed_from", "entries_per_s", "files")}
        self.figures["records_per_s"] = round(done["messages"] / done["ingest_s"])
        self.say(
            f"the same command again read records {done['resumed_from']:,} to {done['position']:,}, three keys each; "
            f"files: {done['files']}"
        )

    def delete_and_show(self) -> None:
        """Delete every record at the broker, and show records of each partition from the archive."""
        left, broker = 0, KafkaBroker({"bootstrap.servers": self.cluster.servers})
        for topic in TOPICS:
            for partition in range(PARTITIONS):
                self.cluster.trim(topic, partition, broker.range((topic, partition))[1])
                log = broker.range((topic, partition))
                left += log.end - log.begin
        wrong, gets, states = [], 0, Counter[str]()
        with contextlib.closing(broker), IndexReader.open(config=self.config.changed(root=None)) as reader:
            source = KafkaMessages(reader.segment_archives, broker, KEYS)
            for record in map(Record, range(0, self.records, max(1, self.records // self.lookups))):
                for kind in (1, 2):
                    answer = reader.messages(record.topic, record.keys[kind], source=source)
                    gets += answer.message_requests
                    if len(answer.messages) != 1:
                        wrong.append(f"{record.topic}/{record.keys[kind]}: {len(answer.messages)} messages, not 1")
                    for fetched in answer.messages:
                        states[fetched.state] += 1
                        if not isinstance(fetched.message, KafkaRecord) or fetched.message.value != record.value:
                            wrong.append(f"{record.topic}/{record.place}: {fetched.state}, {fetched.problem}")
        if left:
            wrong.append(f"{left:,} records are left at the brokers")
        archived = states["archived"]
        self.say(f"the brokers' records deleted ({left} left): {archived:,} looked up, and shown from the archive")
        shown = {"records_at_brokers": left, "shown": archived, "gets_per_record": round(gets / max(1, archived), 2)}
        self.figures |= shown | {"shown_wrong": [*wrong, *(state for state in states if state != "archived")]}

    def _ingest(self, *more: str) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
        place = f"kafka://{self.cluster.servers}/{','.join(TOPICS)}"
        keys = [text for key in KEYS for text in ("--key", key)]
        places = ["--root", f"{self.config.root}", "--storage", f"{self.config.storage}", "--json", "--quiet"]
        geometry = ["--slots", "50000", "--items", "200000", "--archive"]
        return started([sys.executable, "-m", "tiered_index", "ingest", place, *keys, *places, *geometry, *more])

    def look_up(self) -> None:
        """Look keys of each kind up, and every record by its trace."""
        expected: dict[tuple[str, str], set[tuple[int, int]]] = defaultdict(set)
        for record in map(Record, range(self.records)):
            for key in record.keys:
                expected[record.topic, key].add(record.place)
        measured = []
        with IndexReader.open(config=self.config.changed(root=None)) as reader:
            for kind, name in enumerate(KEYS):
                of_kind = Measured(name)
                for number in range(0, self.records, max(1, self.records // self.lookups)):
                    record = Record(number)
                    self._check(reader, of_kind, (record.topic, record.keys[kind]), expected)
                measured.append(of_kind)
            self._take_census(reader)
            self.figures["asked"] = [_shown(reader, topic) for topic in TOPICS]
        wrong = [text for of_kind in measured for text in of_kind.wrong]
        self.figures |= {"lookups": [of_kind.to_dict() for of_kind in measured], "wrong": wrong}

    def _check(self, reader: IndexReader, measured: Measured, pair: tuple[str, str], expected: Any) -> None:
        answer = measured.timed(reader.query, *pair, max_count=10_000)
        places = [(item.queue_id, item.offset) for item in answer]
        if answer.status != "complete" or len(places) != len(expected[pair]) or set(places) != expected[pair]:
            measured.wrong.append(f"{pair}: {len(places)} answers ({answer.status}), {len(expected[pair])} expected")

    def _take_census(self, reader: IndexReader) -> None:
        lost = doubled = 0
        for first in range(0, self.records, _LOOKUPS_AT_ONCE):
            records = [Record(number) for number in range(first, min(self.records, first + _LOOKUPS_AT_ONCE))]
            answers = reader.query_many([Lookup(topic=record.topic, key=record.keys[1]) for record in records])
            for record, answer in zip(records, answers, strict=True):
                places = [(item.queue_id, item.offset) for item in answer]
                lost += record.place not in places
                doubled += len(places) - (record.place in places)
        self.figures |= {"records_lost": lost, "records_doubled": doubled}
        self.say(f"every record looked up by its trace: {lost} lost, {doubled} doubled")


def _shown(reader: IndexReader, topic: str) -> dict[str, Any]:
    answer = reader.query(topic, ASKED)
    return {"topic": topic, "places": [[item.queue_id, item.offset, item.timestamp_ms] for item in answer]}


@command
def demo(session: Session, records: int = Option(200_000, min=2_000, help="Records of the topics.")) -> int:
    """Follow topics of Kafka, kill the follower, and find every record again, also once the brokers have deleted it.

    The broker is a mock cluster in a separate process. The storage is an embedded S3 server. Exit code 1 means that a
    record is lost or doubled, or that an answer is wrong.

    [bold]Examples[/bold]

      python -m tests.demo.kafka

      python -m tests.demo.kafka --records 20000 --json
    """
    refuse_places(session)
    began_s = time.monotonic()
    with demo_place() as (folder, uri), told_times(session.out) as say, kafka_cluster() as cluster:
        say(f"storage: an embedded S3 server; brokers: {cluster.servers} (librdkafka's mock cluster)")
        config = IndexConfig.load(root=folder / "root", storage=uri, background=False)
        stages = Stages(cluster, config, records, min(_LOOKUPS, records // 100), say)
        stages.follow_and_die()
        stages.look_up()
        stages.delete_and_show()
    figures = stages.figures
    figures["wrong"] += figures.pop("shown_wrong")
    figures["wrong_answers"] = len(figures["wrong"])
    wrong = figures["records_lost"] or figures["records_doubled"] or figures["wrong_answers"]
    figures = {"status": "wrong" if wrong else "ok", "records": records, **figures}
    figures["elapsed_s"] = round(time.monotonic() - began_s, 1)
    session.out.answer(figures)
    _write(session.out, figures)
    return _WRONG if wrong else 0


def _write(out: Output, figures: dict[str, Any]) -> None:
    rows = [(f["place"], *lookup_cells(f)) for f in figures["lookups"]]
    out.table(("key", *LOOKUP_COLUMNS), rows, right=LOOKUP_COLUMNS)
    out.line(f"where is {ASKED}?")
    for shown in figures["asked"]:
        for partition, offset, _ in shown["places"]:
            out.line(f"  {shown['topic']}, partition {partition}, offset {offset}")
    out.fields(
        {
            "records": f"{human_count(figures['records'])} in {len(TOPICS)} topics of {PARTITIONS} partitions",
            "keys of a record": ", ".join(KEYS),
            "rate after the kill": f"{human_count(figures['records_per_s'])} records/s, "
            f"{human_count(figures['entries_per_s'])} entries/s",
            "kills survived": f"1 (continued after {human_count(figures['resumed_from'])} records, which were on disk)",
            "records lost": figures["records_lost"],
            "records doubled": figures["records_doubled"],
            "left at the brokers": f"{figures['records_at_brokers']} records",
            "shown from archive": f"{figures['shown']:,} records, {figures['gets_per_record']} GETs a record",
            "wrong answers": figures["wrong_answers"],
            "time": human_seconds(figures["elapsed_s"]),
        }
    )
    write_end(out, figures)


def main(arguments: list[str] | None = None) -> None:
    """Run one command line (the process's own by default) and exit with its code."""
    run(arguments, alone(demo), "python -m tests.demo.kafka")


if __name__ == "__main__":
    main()
