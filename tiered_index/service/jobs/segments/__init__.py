"""Uploads, catalogs and erasure of archived segments."""
