"""The seeded defects, by what they break.

A snippet should be short and unlikely to change; the test named is the fastest that will do.
"""

from __future__ import annotations

from tests.mutants.catalogue import (
    answers,
    buffering,
    checks,
    codecs,
    cold,
    copies,
    durability,
    expiry,
    exports,
    filter_room,
    following,
    hot_keys,
    life,
    log,
    merging,
    publishing,
    recovery,
    segments,
    several,
    simulated,
    spark_audit,
    spark_explain,
    spark_files,
    spark_lookup,
    spark_sources,
    spending,
    staging,
    stale,
    storages,
    structures,
)

__all__ = ["MUTANTS"]

MUTANTS = (
    *copies.MUTANTS,
    *durability.MUTANTS,
    *recovery.MUTANTS,
    *checks.MUTANTS,
    *codecs.MUTANTS,
    *cold.MUTANTS,
    *filter_room.MUTANTS,
    *answers.MUTANTS,
    *hot_keys.MUTANTS,
    *structures.MUTANTS,
    *buffering.MUTANTS,
    *life.MUTANTS,
    *log.MUTANTS,
    *merging.MUTANTS,
    *expiry.MUTANTS,
    *exports.MUTANTS,
    *publishing.MUTANTS,
    *segments.MUTANTS,
    *staging.MUTANTS,
    *simulated.MUTANTS,
    *several.MUTANTS,
    *following.MUTANTS,
    *stale.MUTANTS,
    *storages.MUTANTS,
    *spending.MUTANTS,
    *spark_audit.MUTANTS,
    *spark_lookup.MUTANTS,
    *spark_sources.MUTANTS,
    *spark_explain.MUTANTS,
    *spark_files.MUTANTS,
)
