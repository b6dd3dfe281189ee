"""The cold path: verified reads of what lies in the storage, each byte fetched as seldom as can be.

`path` is the door: trailers, filters and slot groups of stored files, through caches in memory (`byte_cache`) and on
the local disk (`cache_folder`); `spans` joins neighbouring groups into few ranges.
"""
