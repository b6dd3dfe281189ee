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


@pytest.fixture
def file(tmp_path: Path) -> Uri:
    return lambda below: f"file://{tmp_path}/some%20cluster{below}"


@pytest.fixture
def s3(s3_environment: S3Server) -> Uri:
    bucket = s3_environment.new_bucket()
    return lambda below: (
        f"s3://{bucket}/some/cluster{below}?endpoint_url={s3_environment.endpoint_url}&addressing_style=path"
    )


@pytest.fixture
def whole_bucket(s3_environment: S3Server) -> Uri:
    bucket = s3_environment.new_bucket()
    return lambda below: f"s3://{bucket}{below}?endpoint_url={s3_environment.endpoint_url}"


@pytest.fixture(params=["file", pytest.param("s3", marks=pytest.mark.long), "whole_bucket"])
def uri(request: pytest.FixtureRequest) -> Uri:
    made: Uri = request.getfixturevalue(request.param)
    return made


@pytest.fixture
def cluster(tmp_path: Path, uri: Uri) -> Cluster:
    made = Cluster(tmp_path / "roots")
    for number in range(2):
        made.add(uri(f"/broker-{number}"), rows(number, 40))
    return made


def test_a_prefix_is_read_as_the_list_of_its_indexes(cluster: Cluster, uri: Uri) -> None:
    open_storage(uri("/backup")).put("notes/readme", b"no index")
    open_storage(uri("")).put("readme.txt", b"an object beside the indexes")
    open_storage(uri("")).put("broker-0.txt", b"one that sorts between them")
    expected = cluster.expected()
    with IndexReader.open(uri("")) as below, cluster.reader(cluster.uris[::-1]) as listed:
        assert below.sources == tuple(cluster.uris)
        whole = below.query("t", "k", max_count=1000)
        assert cluster.answers(whole) == expected
        assert listed.query("t", "k", max_count=1000).items == whole.items
        cursor, found = None, []
        for reader in (below, listed) * len(expected):
            page = reader.query("t", "k", max_count=7, cursor=cursor)
            found.append(page)
            cluster.check_page(page, cluster.model().query("t", "k", None, None, None, after_of(cluster, found)), 7)
            if (cursor := page.cursor) is None:
                break
        assert cursor is None


def after_of(cluster: Cluster, pages: list[object]) -> tuple[int, int, int, tuple[int, ...]] | None:
    """Return the end of the page before the last one."""
    if len(pages) < 2:
        return None
    return cluster.model([]).order_key_of(cluster.answers(pages[-2])[-1])  # type: ignore[arg-type]


def test_indexes_two_levels_down_are_not_looked_for(tmp_path: Path, uri: Uri) -> None:
    made = Cluster(tmp_path / "roots")
    made.add(uri("/area/broker-0"), rows(1, 10))
    with pytest.raises(NotAnIndex, match=r"cluster|bucket"):
        IndexReader.open(uri(""))
    with IndexReader.open(uri("/area")) as reader:
        assert made.answers(reader.query("t", "k", max_count=100)) == made.expected()


def test_an_index_at_the_prefix_itself_is_read_alone(cluster: Cluster, uri: Uri) -> None:
    cluster.add(uri(""), rows(5, 20))
    with IndexReader.open(uri("")) as reader:
        assert reader.log_state.objects
        assert {item.source for item in reader.query("t", "k")} == {None}


def test_no_index_names_the_prefix(uri: Uri) -> None:
    prefix = open_storage(uri(""))
    for put in (False, True):
        if put:
            prefix.put("backup/readme", b"no index")
        with pytest.raises(NotAnIndex) as caught:
            IndexReader.open(uri(""))
        assert prefix.uri in str(caught.value)


def test_a_bucket_that_is_not_there(s3_environment: S3Server) -> None:
    with pytest.raises(StorageMisconfigured):
        IndexReader.open(f"s3://no-such-bucket-{uuid.uuid4().hex}?endpoint_url={s3_environment.endpoint_url}")
