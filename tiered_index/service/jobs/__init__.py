"""Jobs on objects of a storage: merge, erasure, expiry, replacement, copies, verification, archived segments."""
