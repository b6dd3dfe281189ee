"""Counts of the requests in a block."""

from tiered_index.base.call import Activation, active_context
from tiered_index.storage.metering import Usage


def measured(usage: Usage | None = None) -> Activation[Usage]:
    """Count the calls of metered storages in the block, by `usage`, or by a new one, which the block gets."""
    usage = usage or Usage()
    return Activation(active_context().counting(usage), usage)
