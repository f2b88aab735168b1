"""The device mesh, pipeline stages and sharding."""
