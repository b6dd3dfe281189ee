"""The benchmark of lookups beside a broker: all ways return the same messages, and have rates."""

from __future__ import annotations

import pytest

from tests.benchmarks import rocketmq

pytestmark = pytest.mark.xdist_group("rocketmq brokers")


def test_all_ways_of_the_benchmark_return_the_same_and_have_rates(new_broker, client, tmp_path):
    broker, _ = new_broker()
    measured = rocketmq.measure(client, broker, messages=60, lookups=8, rounds=1, folder=tmp_path)
    assert set(measured) == {"broker", "unsealed", "sealed"}
    assert min(figure for figures in measured.values() for figure in figures.values()) > 0
