"""The registry of connectors: which one reads an address, and connectors of other packages."""

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import Distribution
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.batches import batch
from tests.support.toy_package import install_toys
from tiered_index import IndexReader, IndexService
from tiered_index.cli.main import run
from tiered_index.connectors.documents import lacking
from tiered_index.connectors.erase import messages_to_erase
from tiered_index.connectors.files.spec import SPEC
from tiered_index.connectors.registry import CONNECTORS, ConnectorSpec, Registry
from tiered_index.errors import ConfigError, InvalidArgument
from tiered_index.format.names import linked_store, points_store, rows_store
from tiered_index.format.topic_documents import TopicDocument
from tiered_index.service.jobs.erase import EraseRequest
from tiered_index.service.log.records import ArchivedSegment

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def toy_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package with its own connectors, as an installer leaves it. One of its modules raises when it is imported."""
    install_toys(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    # the registry of the process reads entry points once
    _forget()
    yield
    _forget()


def _forget() -> None:
    for name in ("_others", "_packages"):
        vars(CONNECTORS).pop(name, None)


def test_an_address_belongs_to_one_of_our_connectors(tmp_path: Path) -> None:
    registry = Registry()
    (tmp_path / "file").touch()
    for address, name in (
        ("kafka://broker:9092/orders", "kafka"),
        (str(tmp_path), "rocketmq"),
        (tmp_path.as_uri(), "rocketmq"),
        (str(tmp_path / "file"), "files"),
        (str(tmp_path / "absent"), "files"),
        ("s3://bucket/orders/*.ndjson", "files"),
        ("-", "files"),
    ):
        assert registry.of_address(address).name == name, address
    with pytest.raises(InvalidArgument, match="write topics of Kafka as kafka://broker/orders"):
        registry.of_address("kafka:broker/orders")


def test_a_path_is_known_without_the_connectors_of_other_packages(tmp_path: Path) -> None:
    registry = Registry()
    registry.of_address(str(tmp_path))
    registry.of_address(str(tmp_path / "file.ndjson"))
    assert "_others" not in vars(registry)
    registry.of_address("toy:1")
    assert "_others" in vars(registry)


@pytest.mark.parametrize("kind", ["a folder", "a zip file", "a finder"])
def test_a_connector_is_found_wherever_its_package_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    (packages := tmp_path / "packages").mkdir()
    install_toys(packages)
    with monkeypatch.context() as patched:
        if kind == "a folder":
            patched.syspath_prepend(packages)
        elif kind == "a zip file":
            patched.syspath_prepend(shutil.make_archive(str(tmp_path / "toys"), "zip", packages))
        else:
            # as an import system of its own has it
            finder = SimpleNamespace(
                find_spec=lambda *_: None,
                find_distributions=lambda *_: [Distribution.at(packages / "toy_connectors-1.dist-info")],
            )
            patched.setattr(sys, "meta_path", [*sys.meta_path, finder])
        names = {problem.split()[1] for problem in _problems_of(Registry())}
    assert "broken" in names


@pytest.mark.parametrize(
    ("name", "is_ours"),
    [
        # a clone has them without a version, and programs that start there have it in `sys.path`
        ("tiered_index.egg-info", True),
        ("tiered_index-1.dist-info", True),
        ("tiered_index_more-1.dist-info", False),
        ("tiered_index.more-1.dist-info", False),
    ],
)
def test_entry_points_of_this_package_are_no_reason_to_read_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, is_ours: bool
) -> None:
    read: list[str] = []

    def entry_points(group: str) -> tuple[()]:
        read.append(group)
        return ()

    monkeypatch.setattr("importlib.metadata.entry_points", entry_points)
    (tmp_path / name).mkdir()
    (tmp_path / name / "entry_points.txt").write_text("[tiered_index.connectors]\nkafka = toys:SPEC\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert Registry().others() == []
    assert bool(read) != is_ours


def _problems_of(registry: Registry) -> tuple[str, ...]:
    registry.others()
    return registry.problems


@pytest.mark.usefixtures("toy_package")
def test_a_connector_of_another_package_that_can_not_be_loaded_is_a_note_of_its_own() -> None:
    registry = Registry()
    assert registry.problems == ()
    assert registry.of_address("toy:3").title == "a toy"
    assert registry.of_address("pulsar://host/topic").name == "files"
    assert [problem.partition(" can't be loaded: ")[::2] for problem in sorted(registry.problems)] == [
        ("connector absent (toy_connectors:ABSENT)", "module 'toy_connectors' has no attribute 'ABSENT'"),
        ("connector broken (toy_broken:SPEC)", "no licence"),
        ("connector other (toy_connectors:SPEC)", "it is not a ConnectorSpec with the name 'other'"),
    ]
    # ours can't be replaced
    assert registry.spec("kafka").title == "Kafka"
    with pytest.raises(ConfigError, match=r"^toy:twin: the connectors toy and twin both claim it"):
        registry.of_address("toy:twin")
    for name, problem in (
        ("broken", r"^connector broken \(toy_broken:SPEC\) can't be loaded: no licence"),
        ("gone", r"^connector gone \(toy_connectors:ABSENT\) can't be loaded"),
        ("pulsar", "^there is no connector 'pulsar': install the package that has it"),
    ):
        with pytest.raises(ConfigError, match=problem):
            registry.connector(name)


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Return a function that runs a command, and returns its exit code, stdout and stderr."""
    monkeypatch.setenv("COLUMNS", "120")

    def command(*arguments: object) -> tuple[int, str, str]:
        code = 0
        try:
            run([*map(str, arguments)])
        except SystemExit as ended:
            code = int(ended.code or 0)
        return code, *capsys.readouterr()

    return command


@pytest.mark.usefixtures("toy_package")
def test_ingest_reads_the_source_of_another_package(tmp_path: Path, command: Command) -> None:
    storage = f"file://{tmp_path}/store"
    places = ("--root", tmp_path / "root", "--storage", storage, "--wait", "--json")
    code, out, told = command("ingest", "toy:3", *places)
    assert code == 0, told
    assert (code, json.loads(out)["entries"], json.loads(out)["source_name"]) == (0, 3, "toy:default")
    assert "connector broken (toy_broken:SPEC) can't be loaded: no licence" in told
    # it goes on where it was
    document = json.loads(command("ingest", "toy:5", *places)[1])
    assert (document["entries"], document["resumed_from"]) == (2, 3)
    with IndexReader.open(storage) as reader:
        assert [len(reader.query("toys", f"k{row}")) for row in range(6)] == [1, 1, 1, 1, 1, 0]
    code, _, told = command("ingest", "toy:x", "--root", tmp_path / "new", "--storage", f"file://{tmp_path}/new-store")
    assert (code, "toy:x has no number" in told) == (2, True)
    assert not (tmp_path / "new").exists()
    code, _, told = command("ingest", "toy:3", *places, "--archive-segments")
    assert (code, "--archive-segments is for a RocketMQ store, and toy:3 is a toy" in told) == (2, True)


@pytest.mark.usefixtures("toy_package")
@pytest.mark.parametrize("name", ["ingest", "serve"])
def test_help_shows_the_options_of_a_connector_of_another_package_in_its_panel(command: Command, name: str) -> None:
    code, out, _ = command(name, "--help")
    assert code == 0
    panel = out[out.index(" a toy ") :].partition("╰")[0]
    assert [option in panel for option in ("--toy-speed", "Toys per second.", "--toy-loud", "Play loud.")] == [True] * 4
    # the options of others are shown, too
    assert "Kafka" in out and "wild" not in out


@pytest.mark.usefixtures("toy_package")
def test_options_of_a_connector_of_another_package_are_checked_and_passed_to_it(
    tmp_path: Path, command: Command
) -> None:
    places = ("--root", tmp_path / "root", "--storage", f"file://{tmp_path}/store", "--json")

    def options(*arguments: object) -> dict[str, object]:
        code, out, told = command("ingest", "toy:3", *places, *arguments)
        assert code == 0, told
        taken: dict[str, object] = json.loads(out)["options"]
        return taken

    assert options() == {"speed": 7, "loud": False}
    assert options("--toy-speed", 2, "--toy-loud") == {"speed": 2, "loud": True}
    for arguments, problem in (
        (("ingest", "toy:3", "--toy-speed", 0), "must be at least 1"),
        (("ingest", "toy:3", "--toy-speed", "fast"), "must be a whole number"),
        (("ingest", "toy:3", "--toy-size", 1), "No such option: --toy-size"),
        (("ingest", "kafka://h:1/t", "--toy-speed", 2), "--toy-speed is for a toy, and kafka://h:1/t is Kafka"),
        (("ingest", tmp_path, "--topic", "t", "--toy-loud"), f"--toy-loud is for a toy, and {tmp_path} is files"),
        (("serve", "--toy-loud"), "--toy-loud needs --follow SOURCE"),
        (("serve", "--follow", "kafka://h:1/t", "--toy-loud"), "--toy-loud is for a toy, and kafka://h:1/t is Kafka"),
        (("serve", "--follow", "toy:1", "--commit-group", "g"), "--commit-group is for Kafka, and toy:1 is a toy"),
    ):
        code, _, told = command(*arguments, *places)
        assert (code, problem in " ".join(told.split())) == (2, True), told


@pytest.mark.usefixtures("toy_package")
def test_a_connector_with_an_option_of_another_one_is_a_note_of_its_own(tmp_path: Path, command: Command) -> None:
    places = ("--root", tmp_path / "root", "--storage", f"file://{tmp_path}/store", "--json")
    code, _, told = command("ingest", "toy:3", *places, "--toy-loud")
    assert code == 0
    assert "connector wild (toy_connectors:CONNECTOR) can't be loaded: its options: the flag --key of key must" in told


@pytest.mark.usefixtures("toy_package")
def test_doctor_asks_the_check_of_a_connector_that_has_no_more(command: Command) -> None:
    code, out, _ = command("doctor", "--source", "toy:3", "--toy-loud", "--json")
    (row,) = json.loads(out)["abilities"]
    assert (code, row["of"], row["state"]) == (0, "source", "ok")
    code, _, told = command("doctor", "--source", "toy:x")
    assert (code, "toy:x has no number" in told) == (2, True)


def test_messages_of_a_topic_are_read_by_the_connector_that_its_document_names(
    toy_package: None, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = ("--root", str(tmp_path / "root"), "--storage", (tmp_path / "cold").as_uri())
    assert command("ingest", "toy:3", *where, "--wait")[0] == 0
    with IndexReader.open(where[3]) as reader:
        document = reader.topic_document("toys")
    assert document is not None and (document.connector, document.version, document.package) == ("toy", 1, "toy")
    code, out, _ = command("query", "toys", "k2", "--messages", "--store", "toy:3", "--json", *where)
    (shown,) = json.loads(out)["messages"]
    assert (code, shown["state"], shown["message"], shown["read_from"]) == (0, "local", {"toy": 2}, "toy:3")
    assert json.loads(command("topics", "--json", *where)[1])["topics"][0]["connector"] == "toy"
    # without the package
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder != str(tmp_path)])
    _forget()
    advice = "the connector 'toy' wrote this topic: install the package toy"
    code, out, _ = command("query", "toys", "k2", "--messages", "--json", *where)
    (shown,) = json.loads(out)["messages"]
    assert (code, shown["state"], shown["message"], shown["problem"]) == (0, "missing", None, advice)
    code, out, _ = command("query", "toys", "k2", *where)
    assert code == 0 and "1 found, complete" in out
    code, out, _ = command("message", "k2", "--topic", "toys", *where)
    assert code == 1 and advice in out


@pytest.mark.usefixtures("toy_package")
@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("gone", "connector gone (toy_connectors:ABSENT) can't be loaded"),
        ("broken", "connector broken (toy_broken:SPEC) can't be loaded: no licence"),
        ("rough", "connector rough (toy_broken:SPEC) can't be loaded: no licence"),
        ("other-package", "install the package of-others"),
    ],
)
def test_messages_of_a_connector_that_can_not_be_loaded_tell_the_reason(
    tmp_path: Path, command: Command, name: str, advice: str
) -> None:
    rough = ConnectorSpec(name="rough", title="rough", open="toy_broken:SPEC", claims=lambda address: False)
    CONNECTORS._others[0]["rough"] = rough
    uri, document = f"file://{tmp_path}/objects", TopicDocument.of(name, 1, package="of-others")
    with IndexService.open(root=tmp_path / "root", storage=uri, slots=7, items=20, background=False) as index:
        index.put_source_batch(batch(1), "s", 1, document=lambda topic: document)
        index.seal()
        index.run_lifecycle()
    code, out, err = command("query", "t", "k", "--storage", uri, "--messages", "--json")
    (message,) = json.loads(out)["messages"]
    assert (code, message["state"]) == (0, "missing"), err
    assert f"the connector '{name}' wrote this topic: " in message["problem"] and advice in message["problem"]


def test_a_document_of_a_newer_version_is_not_read_but_names_the_package_to_update(
    tmp_path: Path, command: Command
) -> None:
    """Its facts may mean something else, and some may be new."""
    uri, document = f"file://{tmp_path}/objects", TopicDocument.of("files", SPEC.version + 1, {"times": "new"})
    advice = f"version {SPEC.version + 1} of its facts, and the installed one knows version {SPEC.version}: update the "
    (tmp_path / "rows.ndjson").write_text('{"id": "k", "timestamp": 1700000000}\n')
    with IndexService.open(root=tmp_path / "root", storage=uri, slots=7, items=20, background=False) as index:
        # also of a topic without entries
        index.describe_topics(["new"], document)
        index.put_source_batch(batch(1), "s", 1, document=lambda topic: document)
        index.seal()
        index.run_lifecycle()
        assert f"{advice}package tiered-index" in str(lacking(document))
        find = messages_to_erase(EraseRequest.of("t", "k", None, None), index.segment_archive.state())(0, True)
        segment = ArchivedSegment("s", rows_store(linked_store("t", 0)), 0, 1, 0, 0, 1, 0, columns=(1, 1))
        assert advice in str(find(index.segment_archive, segment).problem)
    code, out, err = command("query", "t", "k", "--storage", uri, "--messages", "--json")
    (message,) = json.loads(out)["messages"]
    assert (code, message["state"]) == (0, "missing") and advice in message["problem"], err
    put = ("ingest", tmp_path / "rows.ndjson", "--topic", "new", "--key", "id", "--root", tmp_path / "root")
    code, _, err = command(*put, "--storage", uri)
    assert code == 2 and "a newer version of the connector 'files' wrote topic 'new': update the package" in err
    with IndexReader.open(uri) as reader:
        assert reader.topic_documents() == {"t": document, "new": document}


def test_the_name_of_a_store_begins_with_its_connector() -> None:
    linked = linked_store("orders", 0)
    of_files = dict.fromkeys([linked, rows_store(linked), points_store(linked)], "files")
    stores = {"kafka:c/orders/0": "kafka", "nats:orders": "nats", **of_files}
    assert {store: CONNECTORS.of_store(store) for store in stores} == stores
