"""Logins, ACLs and TLS with a private authority."""

import pytest
from confluent_kafka.admin import AclOperation, ScramCredentialInfo, ScramMechanism, UserScramCredentialUpsertion

from tests.brokers.kafka.broker import LOGINS
from tests.integration.cli.command_lines import run_here
from tests.kafka.followed import ingest, places

SCRAM_LOGIN = ("scrambled", "scrambled-secret")


@pytest.fixture(scope="session")
def scram_login(broker) -> tuple[str, str]:
    """A user of SCRAM-SHA-256 and the password."""
    user, password = SCRAM_LOGIN
    info = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_256, 4096)
    added = UserScramCredentialUpsertion(user, info, password.encode())
    broker.admin.alter_user_scram_credentials([added])[user].result(30)
    return SCRAM_LOGIN


def login(protocol, mechanism, user, password, authority):
    settings = {
        "security.protocol": protocol,
        "sasl.mechanisms": mechanism,
        "sasl.username": user,
        "sasl.password": password,
    }
    if protocol == "SASL_SSL":
        settings["ssl.ca.location"] = str(authority.certificate_file)
    return settings


def options(settings):
    return [word for name, value in settings.items() for word in ("--kafka", f"{name}={value}")]


@pytest.mark.parametrize("protocol", ["SASL_PLAINTEXT", "SASL_SSL"])
@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256"])
def test_a_login_with_read_on_the_topic_is_enough(
    broker, authority, scram_login, topics, producing, run, topic, storage, protocol, mechanism
):
    topics.create(topic)
    producing.send(topic, [{"key": f"k{n}", "value": f"v{n}"} for n in range(10)])
    user, password = scram_login if mechanism != "PLAIN" else ("indexer", LOGINS["indexer"])
    topics.allow(user, topic, AclOperation.READ)
    chosen = options(login(protocol, mechanism, user, password, authority))
    place = f"kafka://127.0.0.1:{broker.ports[protocol]}/{topic}"
    done = run("ingest", place, "--archive", "--storage", storage, *chosen, "--json")
    assert (done.code, done.document["messages"]) == (0, 10), done.err
    # one note: the login may not read how long the topic keeps its records
    assert done.err.count("\n") == 1 and "allow the client's login DESCRIBE_CONFIGS" in done.err
    address = ("--kafka", f"bootstrap.servers=127.0.0.1:{broker.ports[protocol]}")
    answer = run("query", topic, "k7", "--messages", *address, *chosen, "--json").document
    assert [(fetched["state"], fetched["message"]["body"]) for fetched in answer["messages"]] == [("local", "v7")]


def test_settings_of_a_file(broker, authority, topics, producing, run, topic, storage, tmp_path):
    topics.create(topic)
    producing.send(topic, [{"key": "k", "value": "v"}])
    topics.allow("indexer", topic, AclOperation.READ)
    settings = login("SASL_SSL", "PLAIN", "indexer", LOGINS["indexer"], authority)
    file = tmp_path / "client.properties"
    file.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
    place = f"kafka://127.0.0.1:{broker.ports['SASL_SSL']}/{topic}"
    done = run("ingest", place, "--kafka-config", file, "--storage", storage, "--json")
    assert (done.code, done.document["messages"]) == (0, 1), done.err


def test_tls_without_a_login(broker, authority, topics, producing, index, topic):
    topics.create(topic)
    producing.send(topic, [{"key": "k", "value": "v"}])
    settings = {"security.protocol": "SSL", "ssl.ca.location": str(authority.certificate_file)}
    assert ingest(index, f"127.0.0.1:{broker.ports['SSL']}", topic, settings=settings).messages == 1
    assert places(index, topic, "k") == {(0, 0)}


def test_a_topic_that_the_login_may_not_read(broker, authority, topics, run, topic, storage):
    topics.create(topic)
    chosen = options(login("SASL_PLAINTEXT", "PLAIN", "other", LOGINS["other"], authority))
    place = f"kafka://127.0.0.1:{broker.ports['SASL_PLAINTEXT']}/{topic}"
    unseen = run("ingest", place, "--storage", storage, *chosen, "--json")
    assert unseen.code in (2, 3) and topic in unseen.error["message"]
    topics.allow("other", topic, AclOperation.DESCRIBE)
    described = run("ingest", place, "--storage", storage, *chosen, "--json")
    assert described.code == 3
    assert f"{topic}" in described.error["message"] and "READ" in described.error["message"]


_PLAIN = {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanisms": "PLAIN"}
# the listener, settings of the client, and what the one line of the error says
SETUPS = {
    "wrong password": (
        "SASL_PLAINTEXT",
        {**_PLAIN, "sasl.username": "indexer", "sasl.password": "Pa55word"},
        "Invalid username or password",
    ),
    "wrong mechanism": (
        "SASL_PLAINTEXT",
        {**_PLAIN, "sasl.mechanisms": "SCRAM-SHA-512", "sasl.username": "indexer", "sasl.password": "Pa55word"},
        "supported mechanisms: PLAIN,SCRAM-SHA-256",
    ),
    "TLS without its authority": ("SSL", {"security.protocol": "SSL"}, "verify that ssl.ca.location"),
    "advertised address": ("LOST", {}, "advertised.listeners"),
}


@pytest.mark.parametrize("kind", SETUPS)
@pytest.mark.parametrize("follow", [(), ("--follow",)])
def test_an_error_of_the_setup_is_one_line_that_names_it(
    broker, topics, run, topic, storage, kind, follow, monkeypatch
):
    # this bounds the wait for a cluster: the error is known long before
    monkeypatch.setattr("tiered_index.connectors.kafka.source.TIMEOUT_S", 1_000.0)
    topics.create(topic)
    listener, settings, said = SETUPS[kind]
    place = f"kafka://127.0.0.1:{broker.ports[listener]}/{topic}"
    done = run("ingest", place, "--storage", storage, *options(settings), *follow, "-q", timeout=30)
    assert (done.code, done.err.count("\n")) == (3, 1), done.err
    assert said in done.err and f"127.0.0.1:{broker.ports[listener]}" in done.err
    if kind == "advertised address":
        assert f"127.0.0.1:{broker.unused_port}" in done.err
    assert "Pa55word" not in done.err


@pytest.mark.parametrize("kind", SETUPS)
def test_a_record_of_a_broker_with_a_wrong_setup(broker, topics, topic, kind, monkeypatch):
    monkeypatch.setattr("tiered_index.connectors.kafka.client.broker.TIMEOUT_S", 1_000.0)
    topics.create(topic)
    listener, settings, said = SETUPS[kind]
    address = ("--kafka", f"bootstrap.servers=127.0.0.1:{broker.ports[listener]}")
    done = run_here("message", f"kafka:{topic}/0/0", *address, *options(settings), timeout=30)
    assert done.code == 3
    assert said in done.err
