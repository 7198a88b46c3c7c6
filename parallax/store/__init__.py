"""Where parameters live, in what dtype, on which device."""

from parallax.store.transforms import (
    bf16,
    compress,
    dp,
    fp16,
    fp32,
    mixed_precision,
    shard_zero,
    zero,
)

__all__ = ["bf16", "compress", "dp", "fp16", "fp32", "mixed_precision", "shard_zero", "zero"]
