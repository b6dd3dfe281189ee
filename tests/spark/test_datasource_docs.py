"""The programs of docs/spark-sql.md on both data sources run, one after the other."""

from __future__ import annotations

import pytest

from tests.spark.pages import programs, section


@pytest.mark.long
def test_the_programs_of_the_page_run(spark):
    names: dict[str, object] = {}
    for name, count in (("Data source `tiered_index`", 4), ("Data source `rocketmq_commitlog`", 2)):
        found = programs(section("spark-sql.md", name))
        assert len(found) == count
        for program in found:
            exec(compile(program, "docs/spark-sql.md", "exec"), names)
