"""Threads of the service: workers that make its calls, and the pool that waits for storages.

Imports no other folder of the service.
"""
