"""The same engine on PySpark, for data that one machine can't process, over any number of executors.

    from tiered_index.spark import build, merge

Tasks upload objects under names of their own and change nothing else. The driver publishes them with one log record.
The caller makes the session and imports PySpark, so this package imports without it.

docs/api.md lists all public names, and docs/spark.md has examples.
"""

from tiered_index.connectors.files.rows.mapping import Dialect
from tiered_index.spark.audit.audit import AuditResult, audit
from tiered_index.spark.lookup.hash_column import hash_key
from tiered_index.spark.lookup.lookup import LookupResult, look_up
from tiered_index.spark.metrics import JobMetrics
from tiered_index.spark.session import open_session, register
from tiered_index.spark.writing.build import BuildResult, build
from tiered_index.spark.writing.erase import EraseResult, erase
from tiered_index.spark.writing.linked import LinkedResult, RowsOfFiles, link_files
from tiered_index.spark.writing.merge import MergeResult, merge
from tiered_index.spark.writing.positions import SourceRange

__all__ = [
    "AuditResult",
    "BuildResult",
    "Dialect",
    "EraseResult",
    "JobMetrics",
    "LinkedResult",
    "LookupResult",
    "MergeResult",
    "RowsOfFiles",
    "SourceRange",
    "audit",
    "build",
    "erase",
    "hash_key",
    "link_files",
    "look_up",
    "merge",
    "open_session",
    "register",
]
