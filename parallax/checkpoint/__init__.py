"""Training state as files: safetensors of whole tensors and one JSON index, no pickle."""

from parallax.checkpoint.background import Saving
from parallax.checkpoint.export import export
from parallax.checkpoint.files import Entry, Index, Piece, read_index
from parallax.checkpoint.folder import latest
from parallax.checkpoint.load import load, load_
from parallax.checkpoint.pretrained import load_pretrained
from parallax.checkpoint.read import Read, Reader
from parallax.checkpoint.save import save

__all__ = [
    "Entry",
    "Index",
    "Piece",
    "Read",
    "Reader",
    "Saving",
    "export",
    "latest",
    "load",
    "load_",
    "load_pretrained",
    "read_index",
    "save",
]
