"""Kafka's client, and the calls into it that end."""
