"""Archived segments as readers find them."""
