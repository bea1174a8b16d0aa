"""A model over several processes: each has a part of every large weight (tensor parallelism)."""
