"""Fixtures of the tests on RocketMQ: a name server and a JVM of clients for each version, and brokers."""

import contextlib
import functools
import itertools
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.brokers.jars import class_path
from tests.brokers.rocketmq.living import Asked, Broker, JavaClient, NameServer, serving

NEWEST, OLDEST = "5.4.0", "5.2.0"
_POM = Path(__file__).parent / "pom.xml"
_names = itertools.count()


@pytest.fixture
def topic() -> str:
    """A topic of this test alone."""
    return f"topic-{next(_names)}"


@pytest.fixture(scope="session")
def installed(tmp_path_factory):
    """A function that returns the jars, name server and JVM of clients of a version; each is started once."""
    with contextlib.ExitStack() as stack:

        @functools.cache
        def of_version(version):
            jars = class_path(_POM, "rocketmq", version)
            folder = tmp_path_factory.mktemp(f"rocketmq-{version}")
            namesrv = NameServer(jars, folder / "namesrv")
            stack.callback(namesrv.end)
            client = JavaClient(jars, folder / "client")
            stack.callback(client.end)
            return SimpleNamespace(jars=jars, namesrv=namesrv.address, client=client, version=version)

        yield of_version


@pytest.fixture
def client(installed):
    """Clients and tools of the newest version."""
    return installed(NEWEST).client


@pytest.fixture
def new_broker(installed, tmp_path):
    """A function that starts a broker of this test alone, and returns it and how its tools ask it."""
    with contextlib.ExitStack() as stack:

        def start(version=NEWEST, **settings):
            of_version = installed(version)
            name = f"broker-{next(_names)}"
            broker = Broker(of_version.jars, tmp_path / name, name, of_version.namesrv, **settings)
            stack.callback(broker.end, signal.SIGKILL)
            return broker, Asked(of_version.client, of_version.namesrv, name)

        yield start


@pytest.fixture(scope="session", params=[NEWEST, OLDEST])
def beside(request, installed, tmp_path_factory):
    """A broker (`broker`, `living`) that lives for many tests, and a server that follows its store (`ours`)."""
    of_version = installed(request.param)
    folder = tmp_path_factory.mktemp("beside")
    index = ("--root", folder / "root", "--storage", (folder / "storage").as_uri())
    with contextlib.ExitStack() as stack:
        broker = Broker(of_version.jars, folder / "broker-a", "broker-a", of_version.namesrv)
        stack.callback(broker.end, signal.SIGKILL)
        following = ("--follow", broker.store, "--archive-queues")
        ours = stack.enter_context(serving(of_version.client, "broker-a", *index, *following))
        living = Asked(of_version.client, of_version.namesrv, "broker-a")
        yield SimpleNamespace(broker=broker, living=living, ours=ours, client=of_version.client)
