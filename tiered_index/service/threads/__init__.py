"""Threads of the service: workers and pools. Imports no other folder of the service."""
