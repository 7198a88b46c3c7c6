"""Weights as they cross the ranks in float8 (e4m3): each row with a power of two as its scale."""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = torch.finfo(torch.float8_e4m3fn).max


def to_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round `[out, in]` to bytes of float8, with a power of two `[out]` that each row is times."""
    largest = weight.detach().float().abs().amax(1)
    fits = torch.where(largest > 0, largest / LARGEST, 1.0)
    scales = torch.exp2(torch.ceil(torch.log2(fits)))
    small = (weight.detach().float() / scales[:, None]).to(torch.float8_e4m3fn)
    return small.view(torch.uint8), scales


def from_rows(small: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """What `to_rows` rounded."""
    wide = small.view(torch.float8_e4m3fn).to(torch.float32) * scales[:, None]
    return wide.to(dtype)
