"""Suites that measure the engine on this machine."""
