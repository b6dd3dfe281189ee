"""Campaigns that try to break the engine. Each is a program, and has a sample of itself as tests."""
