"""Tensor parallelism: linear layers and embeddings cut over the tp axis by rules."""

from parallax.tensor.transforms import tensor_parallel, tp

__all__ = ["tensor_parallel", "tp"]
