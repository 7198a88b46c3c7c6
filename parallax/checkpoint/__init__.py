"""Training state as files: safetensors parts and one JSON index, no pickle."""

from parallax.checkpoint.files import Index, Part, read_index
from parallax.checkpoint.load import load_
from parallax.checkpoint.save import save

__all__ = ["Index", "Part", "load_", "read_index", "save"]
