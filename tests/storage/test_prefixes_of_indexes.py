"""A prefix whose children are indexes, by URI, beside foreign objects and folders, on every backend with prefixes."""

import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.s3_server import S3Server
from tests.support.several_indexes import Cluster, rows
from tiered_index import IndexReader
from tiered_index.errors import NotAnIndex, StorageMisconfigured
from tiered_index.storage.opening import open_storage

Uri = Callable[[str], str]
"""Makes the URI of a place below the prefix, or the prefix's own."""


@pytest.fixture(params=["file", "prefix", "whole bucket"])
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> Uri:
    if request.param == "file":
        return lambda below: f"file://{tmp_path}/some%20cluster{below}"
    server: S3Server = request.getfixturevalue("s3_environment")
    top = server.new_bucket() + ("/some/cluster" if request.param == "prefix" else "")
    return lambda below: f"s3://{top}{below}?endpoint_url={server.endpoint_url}&addressing_style=path"


def check_is_no_index(uri: str) -> None:
    with pytest.raises(NotAnIndex) as caught:
        IndexReader.open(uri)
    assert open_storage(uri).uri in str(caught.value)


def test_a_prefix_is_read_as_the_list_of_its_indexes(tmp_path: Path, uri: Uri) -> None:
    check_is_no_index(uri(""))
    open_storage(uri("/backup")).put("notes/readme", b"no index")
    open_storage(uri("")).put("readme.txt", b"an object beside the indexes")
    check_is_no_index(uri(""))
    # those two levels down are not looked for
    Cluster(tmp_path / "deep").add(uri("/area/broker-0"), rows(1, 10))
    check_is_no_index(uri(""))
    cluster = Cluster(tmp_path / "roots")
    for number in range(2):
        cluster.add(uri(f"/broker-{number}"), rows(number, 40))
    open_storage(uri("")).put("broker-0.txt", b"one that sorts between them")
    with IndexReader.open(uri("")) as below, cluster.reader(cluster.uris[::-1]) as listed:
        assert below.sources == tuple(cluster.uris)
        whole = below.query("t", "k", max_count=1000)
        assert cluster.answers(whole) == cluster.expected()
        assert listed.query("t", "k", max_count=1000).items == whole.items
    # an index at the prefix itself is read alone
    cluster.add(uri(""), rows(5, 20))
    with IndexReader.open(uri("")) as reader:
        assert {item.source for item in reader.query("t", "k")} == {None}


def test_a_bucket_that_is_not_there(s3_environment: S3Server) -> None:
    with pytest.raises(StorageMisconfigured):
        IndexReader.open(f"s3://no-such-bucket-{uuid.uuid4().hex}?endpoint_url={s3_environment.endpoint_url}")
