"""`python -m tests.demo --serve`: a broker writes, and the service answers over HTTP and as RocketMQ does."""

import asyncio
import json
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests.demo.command import main
from tests.demo.workload import Workload
from tests.integration.cli.command_lines import TOP, clean_environment, run_here
from tests.rocketmq.remoting_client import Client, by_key, records
from tests.server.conftest import PATIENCE_S
from tests.support.hanging import until
from tiered_index.client import IndexClient
from tiered_index.connectors.rocketmq.log.layout import Host
from tiered_index.connectors.rocketmq.remoting.frames import RequestCode
from tiered_index.errors import ConfigError

DEMO = (sys.executable, "-m", "tests.demo")
MESSAGES = 10_000


async def by_tools(address, key):
    host, port = address.split(":")
    async with Client.open(SimpleNamespace(address=Host(host, int(port)))) as client:
        return records((await client.ask(RequestCode.QUERY_MESSAGE, by_key("orders", key))).body)


@pytest.mark.long
def test_it_answers_until_it_is_ended():
    options = ("--serve", "--messages", MESSAGES, "--json", "--port", 0, "--rocketmq-port", 0)
    line = [*DEMO, *map(str, options)]
    entries = Workload.generate(MESSAGES).entries
    key = "order-0000001"
    with subprocess.Popen(line, cwd=TOP, env=clean_environment(), stdout=subprocess.PIPE, text=True) as process:
        try:
            served = json.loads(process.stdout.readline())
            opens = f"{served['url']}/console/#token={served['token']}&search?topic=orders&key={key}"
            assert served["console"] == opens
            with IndexClient(served["url"], token=served["token"]) as client:
                until(lambda: sum(t.entries for t in client.topics().topics) == entries)
                answer = client.query("orders", key, max_count=5)
                (message, *_) = client.messages("orders", key, max_count=5).messages
            assert len(answer) == 5 and message.item.offset == answer[0].offset
            with pytest.raises(ConfigError), IndexClient(served["url"], token="another") as stranger:
                stranger.topics()
            assert len(asyncio.run(by_tools(served["rocketmq"], key))) > 5
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()


def test_options_that_do_not_fit_are_refused():
    refused = run_here("--serve", "--storage", "memory://x", program=main)
    assert refused.code == 2 and "--storage" in refused.err
