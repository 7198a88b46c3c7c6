"""What a model is made of: which modules and names exist."""

from parallax.surgery.transforms import fp8

__all__ = ["fp8"]
