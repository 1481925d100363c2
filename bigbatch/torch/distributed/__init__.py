"""Training on several ranks: DistributedDataParallel, fully_shard, and what ranks tell each other."""
