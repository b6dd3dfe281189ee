"""The steps after a file is sealed: compaction, upload, staging, retirement, archived segments, orphans; and recovery
after a crash. May import files and the folders below, and the appenders of writing.
"""
