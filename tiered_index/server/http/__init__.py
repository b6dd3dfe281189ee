"""Requests and answers of HTTP: limits, tokens, problems."""
