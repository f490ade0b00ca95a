"""FSDP2 (``fully_shard``): its strategy and adapters, the state of its forwards, sharded loading, 4-bit weights."""
