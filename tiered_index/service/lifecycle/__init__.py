"""What happens to a file after it is sealed: compaction, upload, staging, retirement, archived segments, orphans; and
recovery after a crash. May import files and what stands below them, and the appenders of writing.
"""
