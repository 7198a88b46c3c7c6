"""The algebra: facts, rewrites, transforms, plans and the boosted pair. No parallelism lives
here.
"""
