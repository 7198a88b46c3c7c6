"""What is done to a model's blocks, each by itself: recomputation and compilation."""

from parallax.blocks.transforms import compile, remat  # noqa: A004  (what one says aloud)

__all__ = ["compile", "remat"]
