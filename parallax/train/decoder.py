"""A decoder-only transformer, small enough to read and usual enough to measure with.

Parameter names are part of its interface: `tp_plan` and every checkpoint refer to them.
"""

from __future__ import annotations

import dataclasses
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn import functional

from parallax.errors import ParallaxError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """The numbers that describe a decoder.

    Args:
        dim: Width of the residual stream.
        layers: Number of blocks.
        heads: Number of query heads; `dim / heads` is the width of each.
        kv_heads: Number of key and value heads, each shared by `heads / kv_heads` query heads.
        hidden: Inner width of the feed-forward part.
        vocabulary: Number of token ids.
        tied: Whether the embedding is also the output head.
        theta: Base of the rotary wavelengths.
    """

    dim: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    vocabulary: int = 256
    tied: bool = False
    theta: float = 10_000.0

    def __post_init__(self) -> None:
        if self.dim % self.heads or (self.dim // self.heads) % 2:
            raise ParallaxError(
                f"dim={self.dim} was asked for with heads={self.heads}: that gives heads of width "
                f"{self.dim / self.heads:g}, and rotary positions turn pairs of numbers.\n\n"
                f"Choose dim as an even multiple of heads."
            )
        if self.heads % self.kv_heads:
            raise ParallaxError(
                f"heads={self.heads} was asked for with kv_heads={self.kv_heads}: each key head "
                f"serves the same number of query heads.\n\n"
                f"Choose kv_heads as a divisor of {self.heads}."
            )

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.dim // self.heads


SIZES = MappingProxyType(
    {
        "tiny": Size(dim=128, layers=4, heads=4, kv_heads=2, hidden=384),
        "small": Size(dim=384, layers=6, heads=6, kv_heads=2, hidden=1024),
        "125m": Size(dim=768, layers=12, heads=12, kv_heads=12, hidden=2048, tied=True),
        "1b": Size(dim=2048, layers=16, heads=32, kv_heads=8, hidden=8192),
        "3b": Size(dim=3072, layers=28, heads=24, kv_heads=8, hidden=8192),
        "8b": Size(dim=4096, layers=32, heads=32, kv_heads=8, hidden=14336),
    }
)


def size(name: str, **changes: object) -> Size:
    """The size of that name, for asking by word rather than by number.

    Args:
        name: A key of `SIZES`.
        **changes: Fields of `Size` to set otherwise, such as `vocabulary`.

    Returns:
        The size, with the changes made.

    Raises:
        ParallaxError: There is no size of that name.

    Example:
        >>> size("1b", vocabulary=128_256).head_dim
        64
    """
    if name not in SIZES:
        raise ParallaxError(
            f"The model size {name!r} was asked for; the sizes are {', '.join(SIZES)}.\n\n"
            f"Choose one of those, or build a parallax.train.decoder.Size of your own."
        )
    return dataclasses.replace(SIZES[name], **changes)  # type: ignore[arg-type]


def rotate(x: Tensor, theta: float) -> Tensor:
    """Turns every pair of numbers by an angle that grows with the position (rotary embedding).

    Args:
        x: Queries or keys, [batch, heads, seq, head_dim].
        theta: Base of the wavelengths.

    Returns:
        The turned tensor, in the shape and dtype of `x`. Su et al., arXiv:2104.09864.
    """
    # Made here rather than kept as a buffer: a buffer would need filling after meta-device
    # construction, and mixed precision would round it (or a float argument) to bfloat16.
    half = x.shape[-1] // 2
    exponent = torch.arange(half, device=x.device, dtype=torch.float32) / half
    position = torch.arange(x.shape[-2], device=x.device, dtype=torch.float32)
    angle = torch.outer(position, theta**-exponent)  # [seq, head_dim / 2]
    cos, sin = angle.cos(), angle.sin()
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention in which groups of query heads share a key head."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.head_dim = size.head_dim
        self.theta = size.theta
        self.q = nn.Linear(size.dim, size.heads * size.head_dim, bias=False)
        self.k = nn.Linear(size.dim, size.kv_heads * size.head_dim, bias=False)
        self.v = nn.Linear(size.dim, size.kv_heads * size.head_dim, bias=False)
        self.o = nn.Linear(size.heads * size.head_dim, size.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Mixes each position with those before it, [batch, seq, dim] to the same."""
        # -1 and not the number of heads: under tensor parallelism a rank holds only some of them.
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        )  # [batch, heads / tp, seq, head_dim]
        mixed = functional.scaled_dot_product_attention(
            rotate(q, self.theta),
            rotate(k, self.theta),
            v,
            is_causal=True,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        return self.o(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """The gated two-layer network applied at each position. Shazeer, arXiv:2002.05202."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.gate = nn.Linear(size.dim, size.hidden, bias=False)
        self.up = nn.Linear(size.dim, size.hidden, bias=False)
        self.down = nn.Linear(size.hidden, size.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Works on each position alone, [batch, seq, dim] to the same."""
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One layer: attention, then feed-forward, each added to the residual stream."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(size.dim, eps=1e-5)
        self.attn = Attention(size)
        self.mlp_norm = nn.RMSNorm(size.dim, eps=1e-5)
        self.mlp = FeedForward(size)

    def forward(self, x: Tensor) -> Tensor:
        """Adds this layer's part to the residual stream, [batch, seq, dim] to the same."""
        x = x + self.attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """A language model: token ids in, a score for each possible next token out.

    Args:
        size: The numbers that describe it; `size("tiny")` has them by name.

    Example:
        >>> with torch.device("meta"):
        ...     model = Decoder(size("1b"))
        >>> model(torch.zeros(2, 16, dtype=torch.long, device="meta")).shape
        torch.Size([2, 16, 256])
    """

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.embedding = nn.Embedding(size.vocabulary, size.dim)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.dim, eps=1e-5)
        self.head = nn.Linear(size.dim, size.vocabulary, bias=False)
        if size.tied:
            self.head.weight = self.embedding.weight
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws all weights anew from torch's global generator."""
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                nn.init.ones_(parameter)
                continue
            # Each block adds twice to the residual stream; without the smaller draw the variance
            # of the stream would grow with depth.
            last = name.endswith(("attn.o.weight", "mlp.down.weight"))
            scale = (2 * self.size.layers) ** -0.5 if last else 1.0
            nn.init.normal_(parameter, std=0.02 * scale)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores the next token at every position, [batch, seq] to [batch, seq, vocabulary]."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    @property
    def tp_plan(self) -> dict[str, str]:
        """How the linear layers split over tensor ranks, name pattern to style."""
        plan = {
            "blocks.*.attn.q": "colwise",
            "blocks.*.attn.k": "colwise",
            "blocks.*.attn.v": "colwise",
            "blocks.*.attn.o": "rowwise",
            "blocks.*.mlp.gate": "colwise",
            "blocks.*.mlp.up": "colwise",
            "blocks.*.mlp.down": "rowwise",
        }
        # A tied head is the embedding itself, which stays whole on every rank.
        return plan if self.size.tied else plan | {"head": "colwise_gather_output"}
