"""Verbs of one training step."""

from parallax.step import schedules
from parallax.step.transforms import accumulate, clip, ema

__all__ = ["accumulate", "clip", "ema", "schedules"]
