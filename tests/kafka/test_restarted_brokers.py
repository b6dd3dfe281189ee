"""A broker that restarts with another address again and again, and whose answers are late: nothing hangs, all is read.

librdkafka may lock itself for ever then (its issue 5476). The command ends with exit code 3, and its next run goes on.
"""

import contextlib

import pytest

from tests.kafka.supervised import supervised
from tests.support.cutting_proxy import Fault, cutting_proxy
from tests.support.hanging import until
from tests.support.kafka_cluster import Producing, kafka_cluster
from tiered_index import IndexReader

LATE = Fault(hold_s=0.05)


@pytest.mark.long
def test_ten_restarts_with_another_listener_behind_a_proxy_that_delays(topic, tmp_path):
    with kafka_cluster() as cluster, contextlib.ExitStack() as stack:
        servers, sent = cluster.servers, 0
        proxies = [stack.enter_context(cutting_proxy(servers, b"tiered-index")) for _ in range(3)]
        for proxy in proxies:
            proxy.faults.extend([LATE] * 10_000)

        def send():
            nonlocal sent
            Producing(servers).send(topic, [{"key": f"k{n}"} for n in range(sent, sent + 20)])
            sent += 20

        cluster.advertise(1, proxies[0].port)
        send()
        where = ("--root", tmp_path / "root", "--storage", (tmp_path / "storage").as_uri())
        with supervised(f"kafka://{servers}/{topic}", *where) as command:
            for turn in range(1, 11):
                until(lambda: command.position == sent)
                cluster.take_down(1)
                cluster.advertise(1, proxies[turn % 3].port)
                cluster.bring_up(1)
                send()
            until(lambda: command.position == sent)
            assert command.end() == 0, command.errors
        assert set(command.codes) <= {0, 3}
        assert all(proxy.spoiled for proxy in proxies)
    with IndexReader.open(root=tmp_path / "root") as reader:
        assert [len(reader.query(topic, f"k{n}")) for n in range(sent)] == [1] * sent
