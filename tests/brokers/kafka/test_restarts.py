"""A broker that restarts with another advertised listener while a command follows it through proxies that delay."""

import contextlib

from tests.brokers.kafka.broker import Broker
from tests.brokers.kafka.topics import Topics
from tests.kafka.supervised import supervised
from tests.support.cutting_proxy import Fault, cutting_proxy
from tests.support.hanging import until
from tests.support.kafka_cluster import Producing
from tiered_index import IndexReader

LATE = Fault(hold_s=0.4)


def test_ten_restarts_with_another_listener_lose_no_record_and_hang_for_no_longer_than_the_watch(topic, tmp_path):
    """Only the command's connections are late. Its client may lock itself: then it ends with 3, and starts again."""
    broker, sent = Broker(tmp_path / "kafka"), 0
    broker.format()
    with contextlib.ExitStack() as stack:
        stack.callback(broker.kill)
        proxies = [stack.enter_context(cutting_proxy(broker.address, b"tiered-index")) for _ in range(3)]
        for proxy in proxies:
            proxy.faults.extend([LATE] * 100_000)
        broker.advertise(proxies[0].port)
        broker.start()
        Topics(broker.address).create(topic)

        def send():
            nonlocal sent
            Producing(broker.address).send(topic, [{"key": f"k{n}", "value": "v"} for n in range(sent, sent + 20)])
            sent += 20

        send()
        where = ("--root", tmp_path / "root", "--storage", (tmp_path / "storage").as_uri())
        with supervised(f"kafka://{broker.address}/{topic}", *where) as command:
            for turn in range(1, 11):
                until(lambda: command.position == sent, every_s=0.05)
                broker.kill()
                broker.advertise(proxies[turn % 3].port)
                broker.start()
                send()
            until(lambda: command.position == sent, every_s=0.05)
            assert command.end() == 0, command.errors
        assert set(command.codes) <= {0, 3}
        assert all(proxy.spoiled for proxy in proxies)
    with IndexReader.open(root=tmp_path / "root") as reader:
        assert [len(reader.query(topic, f"k{n}")) for n in range(sent)] == [1] * sent
