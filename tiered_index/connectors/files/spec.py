"""What commands need to know of files before they load what reads them."""

from __future__ import annotations

from tiered_index.connectors.registry import FILES, ConnectorSpec, Words

SPEC = ConnectorSpec(
    name=FILES,
    title="a file",
    words=Words(
        "file",
        "row",
        "no file of the topic has it",
        "it is a topic of files: look up a key",
        message="row",
        key="key",
        in_files=True,
    ),
    open="tiered_index.connectors.files.connector:CONNECTOR",
    # no other connector claims it
    claims=lambda address: True,
    follows=False,
)
