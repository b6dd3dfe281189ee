"""Tools for tests of this package and of others: reference model, storage conformance suite, fault layers."""
