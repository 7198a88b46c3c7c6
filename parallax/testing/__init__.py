"""Tools for testing distributed training, for this package's own tests and for yours."""

from parallax.testing.world import RankError, World, pool, world

__all__ = ["RankError", "World", "pool", "world"]
