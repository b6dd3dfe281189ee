"""Follows topics of Kafka: the source, the client, and the keys of records. docs/kafka.md is its guide."""
