"""The seeded defects, by the promise that they break. Each names the fastest test that notices it."""

from tests.mutants.catalogue import checksums, completeness, durability, erasure, fencing, files

MUTANTS = (
    *checksums.MUTANTS,
    *completeness.MUTANTS,
    *durability.MUTANTS,
    *erasure.MUTANTS,
    *fencing.MUTANTS,
    *files.MUTANTS,
)
