"""Campaigns that try to break the engine, each a program and a pytest sample of itself; `make reliability-report` runs
them all.
"""
