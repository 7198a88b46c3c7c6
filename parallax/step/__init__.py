"""Verbs of one training step."""

from parallax.step.transforms import clip

__all__ = ["clip"]
