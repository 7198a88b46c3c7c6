"""Tools for testing distributed training, for this package's own tests and for yours."""

from parallax.testing.report import Report, Row
from parallax.testing.verify import verify
from parallax.testing.world import RankError, World, pool, world

__all__ = ["RankError", "Report", "Row", "World", "pool", "verify", "world"]
