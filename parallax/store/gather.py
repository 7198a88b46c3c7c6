"""Weights as they cross the ranks in float8 (e4m3): each row with a power of two as its scale."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from parallax.store.compress import LARGEST, TINY


def to_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round `[out, in]` to bytes of float8, with a power of two `[out]` that each row is times."""
    weight = weight.detach().float()
    # With m in [1/2, 1) and largest / 448 = m x 2^e, a row divided by 2^e stays below 448.
    largest = torch.linalg.vector_norm(weight, math.inf, 1) / LARGEST
    _, exponents = torch.frexp(largest)
    scales = torch.ldexp(torch.ones_like(largest), exponents).clamp(min=TINY)
    # The cast turns what is infinite into 448: it must not come back finite.
    scales = torch.where(largest.isfinite(), scales, math.nan)
    small = (weight / scales[:, None]).to(torch.float8_e4m3fn)
    return small.view(torch.uint8), scales


def from_rows(small: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """What `to_rows` rounded; the product rounds nothing in bfloat16 or wider."""
    return small.view(torch.float8_e4m3fn).to(dtype) * scales[:, None].to(dtype)
