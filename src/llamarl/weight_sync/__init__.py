"""DDMA: versioned weights from trainer shards to generator shards, proved by checksum."""
