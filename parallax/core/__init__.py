"""The algebra: facts, rewrites, transforms, plans and the boosted pair; no parallelism."""
