"""The seeded defects, by the promise that they break. The test named is the fastest one that notices the defect."""

from __future__ import annotations

from tests.mutants.catalogue import checksums, completeness, durability, erasure, fencing

MUTANTS = (*checksums.MUTANTS, *completeness.MUTANTS, *durability.MUTANTS, *erasure.MUTANTS, *fencing.MUTANTS)
