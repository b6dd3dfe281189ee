"""Index files of RocketMQ's own tiered store, as its plug-in leaves them: being written, full, compacted, uploaded.

The broker answers lookups from them, and the package reads the same entries in them.
"""

import hashlib
import json
import re
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.brokers.rocketmq.conftest import NEWEST
from tests.brokers.rocketmq.living import Asked, Broker, made_topic, tiered_index, until
from tiered_index.format.foreign import ForeignCompacted, ForeignUnsealed
from tiered_index.format.keys.hashing import key_hash
from tiered_index.format.layout import ROCKETMQ, Layout

pytestmark = pytest.mark.xdist_group("rocketmq brokers")
NAME = "broker-tiered"
LAYOUT = Layout(ROCKETMQ, ROCKETMQ.schema, slots=40, items=64)
TOPICS = {"tiered-a": 30, "tiered-b": 20}
# Three keys and a unique key; the plug-in takes no message that would leave no item free
KEYS = 4
FULL = LAYOUT.items - KEYS
PLUG_IN = "org.apache.rocketmq.tieredstore"
SETTINGS = {
    "messageStorePlugIn": f"{PLUG_IN}.TieredMessageStore",
    "tieredBackendServiceProvider": f"{PLUG_IN}.provider.PosixFileSegment",
    # the broker looks for keys in its tiered store alone, and messages go there at once
    "tieredStorageLevel": "FORCE",
    "tieredStoreGroupCommit": "false",
    "tieredStoreIndexFileMaxHashSlotNum": LAYOUT.slots,
    "tieredStoreIndexFileMaxIndexNum": LAYOUT.items,
}


@pytest.fixture(scope="module")
def tiered(installed, tmp_path_factory):
    """Files in each state, and the broker's answers from local and from uploaded ones.

    A file is where the broker wants a folder for uploaded index files. So it can't upload the first file that it
    compacts, and keeps it. Then it is killed. When it starts again without that obstacle, it uploads all full files.
    """
    of_version, folder = installed(NEWEST), tmp_path_factory.mktemp("tiered")
    cluster = f"{hashlib.md5(b'DefaultCluster').hexdigest()[:8]}_DefaultCluster"
    backend = folder / "backend" / cluster / NAME
    obstacle = backend / "rmq_sys_INDEX"
    backend.mkdir(parents=True)
    obstacle.touch()
    settings = {**SETTINGS, "tieredStoreFilePath": folder / "backend"}
    broker = Broker(of_version.jars, folder / NAME, NAME, of_version.namesrv, **settings)
    local, copied = broker.store / "tiered_index_file", folder / "copied"
    try:
        living = Asked(of_version.client, of_version.namesrv, NAME)
        for topic, count in TOPICS.items():
            made_topic(living, broker, topic)
            sent = [{"keys": " ".join(keys_of(n)), "body": f"{n:04d}", "queue": n % 3} for n in range(count)]
            living.send(topic, *sent)
        # the plug-in looks for new queues, and then for their messages, every 20 seconds
        until(lambda: sum(map(entries_of_header, files_in(local))) == KEYS * sum(TOPICS.values()), 240.0)
        until(lambda: files_in(local / "compacting"))
        answers = {"local": answers_of(living)}
        broker.end(signal.SIGKILL)
        shutil.copytree(local, copied)
        obstacle.unlink()
        broker.start()
        until(lambda: len(files_in(local)) == 1)
        answers["uploaded"] = answers_of(living)
    finally:
        broker.end(signal.SIGKILL)
    metadata = (broker.store / "config" / "tieredStoreMetadata.json").read_text()
    yield SimpleNamespace(
        answers=answers,
        backend=backend,
        numbers={topic: int(number) for number, topic in re.findall(r'"topicId":(\d+),\s*"topic":"([^"]+)"', metadata)},
        files={
            "unsealed": [path for path in files_in(copied) if entries_of_header(path) < FULL],
            "full": [path for path in files_in(copied) if entries_of_header(path) == FULL],
            "compacted": files_in(copied / "compacting"),
            "uploaded": files_in(obstacle / "0" / "INDEX"),
        },
    )


def keys_of(number):
    return ["k", f"k{number}", f"m{number % 5}"]


def files_in(folder):
    return sorted(path for path in folder.iterdir() if path.is_file()) if folder.is_dir() else []


def entries_of_header(path):
    return int.from_bytes(path.read_bytes()[24:28], "big")


def bodies_of(topic, key):
    """Return the bodies of the messages with a key."""
    return [f"{n:04d}" for n in range(TOPICS[topic]) if key in keys_of(n)]


def answers_of(living):
    """Return the broker's answer to each key of each topic, and to each unique key.

    Reads of the posix provider share a position in their file. So an answer may lack messages, or have another message
    in their place: ask again.
    """

    def right(ask, topic, key, bodies):
        def asked():
            answer = living.answered(ask, topic, key)
            messages = answer if isinstance(answer, list) else [answer]
            return sorted(message["body"] for message in messages) == bodies and messages

        return until(asked)

    pairs = {(topic, key) for topic, count in TOPICS.items() for n in range(count) for key in keys_of(n)}
    answers = {place: right("by_key", *place, bodies_of(*place)) for place in sorted(pairs)}
    ids = {(topic, message["id"]): message["body"] for topic in TOPICS for message in answers[topic, "k"]}
    return answers | {place: right("by_id", *place, [body]) for place, body in sorted(ids.items())}


def opened(path, state):
    """Return the reader of a file, and its items."""
    data = path.read_bytes()
    if state in ("unsealed", "full"):
        image = ForeignUnsealed(data, LAYOUT, path.name)
        return image, [row for chunk in image.items() for row in chunk.tolist()]

    def read(position, length):
        return data[position : position + length]

    compacted = ForeignCompacted.open(read, len(data), path.name)
    return compacted, [row for chunk in compacted.items(read) for row in chunk.tolist()]


@pytest.mark.parametrize(
    ("answered", "states"), [("local", ("unsealed", "full")), ("uploaded", ("unsealed", "uploaded"))]
)
def test_entries_of_all_keys_are_those_of_the_brokers_answers(tiered, answered, states):
    """Each entry has a topic's number, an offset in a queue's flat file, a size, and whole seconds after the begin."""
    places = {}
    for state in states:
        for path in tiered.files[state]:
            image, items = opened(path, state)
            for hashed, number, queue, offset, size, difference in items:
                places.setdefault((hashed, number, queue, offset, size), []).append((image.header.begin_ms, difference))
    assert sum(map(len, places.values())) == KEYS * sum(TOPICS.values())
    answered_places = set()
    for (topic, key), messages in tiered.answers[answered].items():
        for message in messages:
            offset, size = message["log_offset"], message["size"]
            place = (key_hash(topic, key), tiered.numbers[topic], message["queue"], offset, size)
            answered_places.add(place)
            ((begin_ms, difference),) = places[place]
            # Java rounds towards zero
            assert difference == int((message["store_ms"] - begin_ms) / 1000)
            (flat,) = files_in(tiered.backend / topic / str(message["queue"]) / "COMMIT_LOG")
            assert message["id"].encode() in flat.read_bytes()[offset : offset + size]
    assert answered_places == set(places)


def test_a_file_has_the_same_entries_in_each_state(tiered):
    assert {state: len(paths) for state, paths in tiered.files.items()} == {
        "unsealed": 1,
        "full": 3,
        "compacted": 1,
        "uploaded": 3,
    }
    (compacted,) = tiered.files["compacted"]
    first, *_ = tiered.files["full"]
    assert compacted.name == first.name
    # recovery overwrites the end in the header by the begin
    without_end = [(data[:12], data[20:]) for data in map(Path.read_bytes, [compacted, *tiered.files["uploaded"]])]
    assert without_end[0] in without_end[1:]
    full, uploaded = (
        {image.header.begin_ms: sorted(items) for image, items in (opened(path, state) for path in tiered.files[state])}
        for state in ("full", "uploaded")
    )
    assert uploaded == full


@pytest.mark.parametrize("state", ["unsealed", "full", "compacted", "uploaded"])
def test_commands_read_the_files(tiered, state):
    path, *_ = tiered.files[state]
    _, items = opened(path, state)
    geometry = ("--set", f"slots={LAYOUT.slots}", "--set", f"items={LAYOUT.items}")
    *dumped, status = map(json.loads, tiered_index("files", path, "--entries", *geometry).splitlines())
    assert status == {"status": "complete", "entries": len(items), "checksummed": False}
    names = ("key_hash", "topic_id", "queue_id", "offset", "size")
    assert [tuple(entry[name] for name in names) for entry in dumped] == [row[:5] for row in items]
    assert "0 findings" in tiered_index("verify", path, *geometry)
