"""Load on `tiered-index serve` over sockets."""
