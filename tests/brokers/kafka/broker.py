"""A broker of Kafka (KRaft, broker and controller in one process) and a cluster of three, for tests.

The listeners of a broker, each on a port of its own:

| listener | who comes in |
|---|---|
| PLAINTEXT | everyone, as a super user |
| SASL_PLAINTEXT | a login by SCRAM-SHA-256, or by PLAIN as in `LOGINS`; ACLs decide what it may do |
| SSL, SASL_SSL | the same two over TLS, with a certificate of a private authority (`Authority`) |
| LOST | everyone, but the cluster advertises an address at which nothing listens |
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

from confluent_kafka.admin import AdminClient

from tests.brokers.jars import class_path
from tests.brokers.java import JavaProcess, java_command, run_java
from tests.support.authority import Authority
from tests.support.ports import free_ports

NEWEST, OLDEST = "4.4.0", "4.0.0"
VERSION = "4.3.1"
LOGINS = {"indexer": "indexer-secret", "other": "other-secret"}
"""Users and passwords of SASL's mechanism PLAIN. ACLs give them what they may do."""
_POM = Path(__file__).with_name("pom.xml")
_CLUSTER = "MkU3OEVBNTcwNTJENDM2Qk"
_SHORT = {
    "offsets.topic.num.partitions": 4,
    "transaction.state.log.num.partitions": 4,
    "group.initial.rebalance.delay.ms": 0,
    "log.retention.check.interval.ms": 500,
    "log.initial.task.delay.ms": 500,
    "log.cleaner.backoff.ms": 200,
    "log.segment.delete.delay.ms": 100,
    "log.cleaner.dedupe.buffer.size": 16 << 20,
    "message.max.bytes": 25_000_000,
    "replica.fetch.max.bytes": 25_000_000,
    "transaction.max.timeout.ms": 3_600_000,
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": 500,
    "transaction.partition.verification.enable": "false",
    # a leader that was killed is missed sooner
    "broker.session.timeout.ms": 4000,
    "broker.heartbeat.interval.ms": 500,
    "num.io.threads": 2,
    "num.network.threads": 2,
    "log.cleaner.threads": 1,
    "background.threads": 2,
    "auto.create.topics.enable": "false",
    "controlled.shutdown.enable": "false",
}
_LOGGING = """\
Configuration:
  Appenders:
    Console: {name: STDOUT, PatternLayout: {pattern: "[%d] %p %m (%c)%n"}}
  Loggers:
    Root: {level: INFO, AppenderRef: [{ref: STDOUT}]}
"""


class Broker:
    """A broker in a folder of its own. `address` is its listener for everyone, `ports` has the ports of listeners."""

    def __init__(
        self,
        folder: Path,
        version: str = VERSION,
        *,
        number: int = 1,
        voters: Mapping[int, int] | None = None,
        authority: Authority | None = None,
        settings: Mapping[str, object] | None = None,
    ) -> None:
        self.folder, self.version, self.number = folder, version, number
        self.jars = class_path(_POM, "kafka", version)
        self.process: JavaProcess | None = None
        names = ["PLAINTEXT", "CONTROLLER"]
        names += ["SASL_PLAINTEXT", "SSL", "SASL_SSL", "LOST"] if authority is not None else []
        ports = free_ports(len(names) + 1)
        self.ports = dict(zip(names, ports, strict=False))
        self.unused_port = ports[-1]
        if voters is not None:
            self.ports["CONTROLLER"] = voters[number]
        else:
            voters = {number: self.ports["CONTROLLER"]}
        self.address = f"127.0.0.1:{self.ports['PLAINTEXT']}"
        self.folder.mkdir(parents=True, exist_ok=True)
        (folder / "log4j2.yaml").write_text(_LOGGING)
        lines = {**self._lines(voters), **_SHORT, **(settings or {})}
        if authority is not None:
            lines |= self._secure_lines(authority)
        self._file = folder / "server.properties"
        self._file.write_text("".join(f"{name}={value}\n" for name, value in lines.items()))

    def _lines(self, voters: Mapping[int, int]) -> dict[str, object]:
        advertised = {name: port for name, port in self.ports.items() if name != "CONTROLLER"}
        if "LOST" in advertised:
            advertised["LOST"] = self.unused_port
        replicas = len(voters)
        return {
            "process.roles": "broker,controller",
            "node.id": self.number,
            "listeners": ",".join(f"{name}://127.0.0.1:{port}" for name, port in self.ports.items()),
            "advertised.listeners": ",".join(f"{name}://127.0.0.1:{port}" for name, port in advertised.items()),
            "controller.listener.names": "CONTROLLER",
            "controller.quorum.voters": ",".join(f"{number}@127.0.0.1:{port}" for number, port in voters.items()),
            "listener.security.protocol.map": ",".join(
                f"{name}:{'PLAINTEXT' if name in ('CONTROLLER', 'LOST') else name}" for name in self.ports
            ),
            "inter.broker.listener.name": "PLAINTEXT",
            "log.dirs": self.folder / "data",
            "offsets.topic.replication.factor": replicas,
            "transaction.state.log.replication.factor": replicas,
            "transaction.state.log.min.isr": 1,
            "share.coordinator.state.topic.replication.factor": replicas,
            "share.coordinator.state.topic.min.isr": 1,
        }

    def _secure_lines(self, authority: Authority) -> dict[str, object]:
        users = " ".join(f'user_{name}="{password}"' for name, password in LOGINS.items())
        plain = f"org.apache.kafka.common.security.plain.PlainLoginModule required {users};"
        scram = "org.apache.kafka.common.security.scram.ScramLoginModule required;"
        logins = {
            f"listener.name.{listener}.{mechanism}.sasl.jaas.config": module
            for listener in ("sasl_plaintext", "sasl_ssl")
            for mechanism, module in (("plain", plain), ("scram-sha-256", scram))
        }
        return {
            "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256",
            **logins,
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": authority.server_file,
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": "User:ANONYMOUS",
        }

    def advertise(self, port: int) -> None:
        """Let it advertise another port of this host from its next start on."""
        lines = self._file.read_text().splitlines()
        others = [line for line in lines if not line.startswith("advertised.listeners=")]
        self._file.write_text("\n".join([*others, f"advertised.listeners=PLAINTEXT://127.0.0.1:{port}", ""]))

    def format(self) -> None:
        """Make its storage."""
        run_java(self.jars, "kafka.tools.StorageTool", "format", "-t", _CLUSTER, "-c", str(self._file))

    def begin(self) -> None:
        """Start it, and do not wait for it."""
        options = ["-Xmx512m", f"-Dlog4j2.configurationFile={self.folder / 'log4j2.yaml'}"]
        command = java_command(self.jars, "kafka.Kafka", str(self._file), options=options)
        self.process = JavaProcess(command, self.folder / "server.log")

    def start(self) -> None:
        """Start it, and wait until it serves."""
        self.begin()
        self.wait()

    def wait(self) -> None:
        """Wait until it serves."""
        assert self.process is not None
        self.process.wait_for("Kafka Server started")

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Stop it, and wait for its end."""
        if self.process is not None:
            self.process.stop(number)
            self.process = None

    def kill(self) -> None:
        """Kill it."""
        self.stop(signal.SIGKILL)

    def tool(self, main: str, *arguments: str) -> str:
        """Run a tool of Kafka by its class; return what it prints."""
        return run_java(self.jars, main, *arguments)

    @cached_property
    def admin(self) -> AdminClient:
        """A client for questions and changes, as a super user."""
        return AdminClient({"bootstrap.servers": self.address, "log_level": 0})


class BrokerCluster:
    """Three brokers with replicas."""

    def __init__(self, folder: Path, version: str = VERSION, settings: Mapping[str, object] | None = None) -> None:
        voters = dict(enumerate(free_ports(3), 1))
        self.brokers = {
            number: Broker(folder / f"{number}", version, number=number, voters=voters, settings=settings)
            for number in voters
        }
        self.servers = ",".join(broker.address for broker in self.brokers.values())

    def start(self) -> None:
        """Format and start all, and wait until they serve."""
        for broker in self.brokers.values():
            broker.format()
        for broker in self.brokers.values():
            broker.begin()
        for broker in self.brokers.values():
            broker.wait()

    def stop(self) -> None:
        """Kill all."""
        for broker in self.brokers.values():
            broker.kill()

    def leader(self, topic: str, partition: int = 0) -> int:
        """Return the number of the broker that leads a partition; -1: none does."""
        client = AdminClient({"bootstrap.servers": self.servers, "log_level": 0})
        return client.list_topics(topic, timeout=60).topics[topic].partitions[partition].leader
