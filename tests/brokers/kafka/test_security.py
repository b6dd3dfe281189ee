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
@pytest.mark.parametrize("command", ["ingest", "ingest --follow", "message"])
def test_an_error_of_the_setup_is_one_line_that_names_it(
    broker, topics, run, topic, storage, kind, command, monkeypatch
):
    # this bounds the wait for a cluster: the error is known long before
    module = "client" if command == "message" else "source"
    monkeypatch.setattr(f"tiered_index.kafka.{module}.TIMEOUT_S", 1_000.0)
    topics.create(topic)
    listener, settings, said = SETUPS[kind]
    address = f"127.0.0.1:{broker.ports[listener]}"
    if command == "message":
        server = ("--kafka", f"bootstrap.servers={address}")
        done = run_here(command, f"kafka:{topic}/0/0", *server, *options(settings), timeout=30)
        assert (done.code, said in done.err) == (3, True), done.err
        return
    where = (f"kafka://{address}/{topic}", "--storage", storage, *options(settings), *command.split()[1:])
    done = run("ingest", *where, "-q", timeout=30)
    assert (done.code, done.err.count("\n")) == (3, 1), done.err
    assert said in done.err and address in done.err
    if kind == "advertised address":
        assert f"127.0.0.1:{broker.unused_port}" in done.err
    assert "Pa55word" not in done.err
