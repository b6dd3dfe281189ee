"""What commands need to know of files before they load what reads them."""

from __future__ import annotations

from tiered_index.connectors.registry import FILES, ConnectorSpec

SPEC = ConnectorSpec(
    name=FILES,
    title="a file",
    open="tiered_index.connectors.files.connector:CONNECTOR",
    # no other connector claims it
    claims=lambda address: True,
    follows=False,
)
