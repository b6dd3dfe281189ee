"""The steps after a file is sealed: compaction, upload, staging, retirement, archived segments, orphans. Also recovery.

It may import files and the packages that it imports, and the appenders of writing.
"""
