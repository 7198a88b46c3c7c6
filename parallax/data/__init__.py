"""Batches, cut over the data ranks."""

from parallax.data.loader import loader

__all__ = ["loader"]
