"""Merge: uploaded files become window tables, so that requests grow with windows, not with messages.

`plan` decides from the log's state alone what is merged into which windows and cuts the work into tasks by base slots;
`task` reads its run of every source in bounded pieces and uploads shards under names of its own; `publish` proves that
nothing was lost or doubled and appends one log record. A task runs anywhere: in this process, or in a Spark executor.
"""
