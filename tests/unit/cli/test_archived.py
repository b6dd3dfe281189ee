"""The new index of `ingest archive:URI` may not lie below the prefix of the old one."""

import pytest

from tiered_index.cli.archived import is_inside


@pytest.mark.parametrize(
    ("uri", "prefix", "is_below"),
    [
        ("s3://bucket/a/b", "s3://bucket/a", True),
        ("s3://bucket/a/b", "s3://bucket/a/", True),
        ("s3://bucket/a", "s3://bucket", True),
        ("s3://bucket/a", "s3://bucket/", True),
        ("s3a://bucket/a?profile=x", "s3://bucket", True),
        ("s3://bucket/a%2Fb", "s3://bucket/a", True),
        ("s3://bucket/a-2", "s3://bucket/a", False),
        ("s3://bucket", "s3://bucket/a", False),
        ("s3://other/a", "s3://bucket", False),
        ("gs://bucket/a", "s3://bucket", False),
        ("file:///a/../a/b", "file:///a", True),
        ("file:///a/b", "file:///", True),
    ],
)
def test_a_storage_is_inside_the_prefix_of_another(uri, prefix, is_below):
    assert is_inside(uri, prefix) is is_below
