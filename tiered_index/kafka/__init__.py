"""Records of Kafka: the source that follows topics, the keys that it indexes, and records read again by their place."""
