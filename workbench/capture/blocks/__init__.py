"""Blocks of an exported graph: their extraction, their JSON, their matrices, and what tensor parallelism can shard."""
