"""A package that adds connectors, as an installer leaves it. One of its modules raises when it is imported."""

from pathlib import Path

__all__ = ["install_toys"]

_TOY = """
import contextlib
from dataclasses import dataclass

from tiered_index.connectors.contract import OpenedSource
from tiered_index.connectors.options import declare
from tiered_index.connectors.registry import ConnectorSpec
from tiered_index.connectors.source import Batch, Lag
from tiered_index.errors import InvalidArgument
from tiered_index.service.read.answers.messages import Fetched

@dataclass(frozen=True)
class ToyOptions:
    speed: int = declare(7, min=1, metavar="N", help="Toys per second.")
    loud: bool = declare(False, "--toy-loud", help="Play loud.")

@dataclass(frozen=True)
class WildOptions:
    key: str = declare(None, "--key", help="A key.")

class ToySource:
    place, unit, offsets = "toy", "numbers", "numbers"

    def __init__(self, index, count, name, options):
        self.count, self.name, self.position = count, name, index.durable_position(name) or 0
        self.options = options

    @property
    def trouble(self):
        return "the toy is loud" if self.options["loud"] else None

    def counts(self):
        return {"options": self.options}

    def gauges(self):
        return {"follow_toys": ("Toys in the box.", self.count)}

    def positions(self):
        return {self.name: self.position}

    def lag(self):
        return Lag(self.count, self.count - self.position, None)

    def batches(self):
        begin, self.position = self.position, self.count
        rows = range(begin, self.count)
        columns = {
            "topic": ["toys" for _ in rows],
            "queue_id": [0 for _ in rows],
            "key": [f"k{row}" for row in rows],
            "offset": [*rows],
            "size": [1 for _ in rows],
            "timestamp_ms": [1_700_000_000_000 for _ in rows],
        }
        yield Batch(source=self.name, position=self.count, columns=columns, messages=len(rows))

    def close(self):
        pass

@dataclass(frozen=True)
class ToyMessage:
    number: int

    def to_dict(self, body="text", max_body_bytes=1 << 20):
        return {"toy": self.number}

@dataclass
class ToyMessages:
    address: str

    def fetch(self, items, topic, key):
        read = dict(state="local", read_from=self.address)
        return [Fetched(item=item, message=ToyMessage(item.offset), **read) for item in items]

    def close(self):
        pass

class Toy:
    def check(self, run, config):
        if not run.address.removeprefix("toy:").isdecimal():
            raise InvalidArgument(f"{run.address} has no number")

    def source(self, run, index):
        name = f"toy:{run.name or 'default'}"
        source = ToySource(index, int(run.address.removeprefix("toy:")), name, vars(run.options))
        return OpenedSource(source, None, source.name)

    def watch(self, tell):
        return contextlib.nullcontext(lambda: ["toy: the box is open"])

    def place(self, options, address=None):
        return ToyMessages(address)

    def messages(self, places):
        return places.place or ToyMessages("nowhere")

CONNECTOR = Toy()
SPEC = ConnectorSpec(
    name="toy",
    title="a toy",
    open="toy_connectors:CONNECTOR",
    claims=lambda address: address.startswith("toy:"),
    options=ToyOptions,
)
WILD = ConnectorSpec(
    name="wild",
    title="wild",
    open="toy_connectors:CONNECTOR",
    claims=lambda address: address.startswith("wild:"),
    options=WildOptions,
)
GONE = ConnectorSpec(
    name="gone", title="gone", open="toy_connectors:ABSENT", claims=lambda address: address.startswith("gone:")
)
TWIN = ConnectorSpec(
    name="twin", title="a twin", open="toy_connectors:CONNECTOR", claims=lambda address: address.startswith("toy:twin")
)
"""
_ENTRY_POINTS = """[tiered_index.connectors]
toy = toy_connectors:SPEC
gone = toy_connectors:GONE
twin = toy_connectors:TWIN
absent = toy_connectors:ABSENT
broken = toy_broken:SPEC
other = toy_connectors:SPEC
wild = toy_connectors:WILD
kafka = toy_connectors:SPEC
"""


def install_toys(folder: Path) -> None:
    """Write the package into a folder for `sys.path`."""
    (folder / "toy_connectors.py").write_text(_TOY)
    (folder / "toy_broken.py").write_text("raise RuntimeError('no licence')\n")
    about = folder / "toy_connectors-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1\n")
    (about / "entry_points.txt").write_text(_ENTRY_POINTS)
