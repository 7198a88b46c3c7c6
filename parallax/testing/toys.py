"""Small models with awkward parts, to try compositions on in a fraction of a second.

Each model holds something that trips parallel training: tied weights, scalars, parameters without
elements or without gradients, sizes that do not divide, statistics of a batch, dictionaries.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY, WIDTH, HEADS, CONTEXT = 24, 16, 4, 6
IGNORED = -100  # cross_entropy's own mark of a target that does not count


class Attention(nn.Module):
    """Causal attention whose heads are counted with -1, so that a rank may hold some of them.

    Args:
        width: Length of a token's vector.
        heads: Number of heads.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads, self.head_width = heads, width // heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Mix tokens. `[batch, seq, width] -> [batch, seq, width]`."""
        # unflatten, since view cannot tell what -1 stands for when a rank has no rows.
        split = (-1, self.head_width)
        projected = (torch.unflatten(f(x), -1, split) for f in (self.query, self.key, self.value))
        q, k, v = (heads.transpose(1, 2) for heads in projected)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """A pre-norm decoder block.

    Args:
        width: Length of a token's vector.
        heads: Number of heads.
        dropout: Probability of dropping an activation of the residual stream.
    """

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Apply attention and MLP. `[batch, seq, width] -> [batch, seq, width]`."""
        x = x + self.dropout(self.attn(self.norm1(x)))
        return x + self.dropout(self.down(functional.gelu(self.up(self.norm2(x)))))


class Gpt(nn.Module):
    """A decoder of two blocks, with the awkward parts that are asked for.

    Args:
        tied: The head is the embedding.
        scalar: A parameter without dims scales the output.
        frozen: The first block's attention and the positions get no gradient.
        unused: A layer that the forward never touches.
        empty: A parameter with no elements.
        heads: Number of attention heads.
        blocks: Number of blocks.
        dropout: Probability of dropping an activation.
        counts: Whether a buffer counts the forwards, which are more when a batch is run in parts.

    Example:
        >>> model = Gpt(tied=True)
        >>> model.head.weight is model.embed.weight, sorted(set(model.tp_plan.values()))
        (True, ['colwise', 'colwise_gather_output', 'embedding_rowwise', 'rowwise'])
    """

    def __init__(
        self,
        *,
        tied: bool = False,
        scalar: bool = False,
        frozen: bool = False,
        unused: bool = False,
        empty: bool = False,
        heads: int = HEADS,
        blocks: int = 2,
        dropout: float = 0.0,
        counts: bool = True,
    ) -> None:
        super().__init__()
        self.counts = counts
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(0.1 * torch.randn(CONTEXT, WIDTH))
        self.blocks = nn.ModuleList(Block(WIDTH, heads, dropout) for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("depth", torch.tensor(0.5, dtype=torch.float32), persistent=False)
        if tied:
            self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(0.9)) if scalar else None
        self.spare = nn.Linear(WIDTH, 3) if unused else None
        self.nothing = nn.Parameter(torch.empty(0, WIDTH)) if empty else None
        if frozen:
            self.positions.requires_grad_(False)
            self.blocks[0].attn.requires_grad_(False)

    @property
    def tp_plan(self) -> dict[str, str]:
        """How the model is cut over a tensor axis, in the words of transformers' plans."""
        return {
            "embed": "embedding_rowwise",
            "blocks.*.attn.query": "colwise",
            "blocks.*.attn.key": "colwise",
            "blocks.*.attn.value": "colwise",
            "blocks.*.attn.out": "rowwise",
            "blocks.*.up": "colwise",
            "blocks.*.down": "rowwise",
            "head": "colwise_gather_output",
        }

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token. `[batch, seq] -> [batch, seq, vocabulary]`."""
        if self.training and self.counts:
            self.seen += 1
        x = self.embed(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        if self.nothing is not None:
            x = x + self.nothing.sum()
        logits = self.head(self.norm(x))
        return logits if self.scale is None else logits * self.scale


class ConvNet(nn.Module):
    """Convolutions with BatchNorm, whose statistics run over the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(2, 6, 3, padding=1, bias=False),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.Conv2d(6, 5, 3, padding=1),
            nn.BatchNorm2d(5, affine=False),
            nn.Flatten(),
        )
        self.head = nn.Sequential(nn.Linear(5 * 16, 7), nn.BatchNorm1d(7), nn.Tanh())
        self.last = nn.Linear(7, 3)

    def forward(self, images: Tensor) -> Tensor:
        """Classify images. `[batch, 2, 4, 4] -> [batch, 3]`."""
        return self.last(self.head(self.body(images)))


class Mlp(nn.Module):
    """Linear layers of sizes that no number of ranks divides.

    Args:
        sizes: Lengths of the layers' inputs and of the last output.
    """

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        sizes = sizes or (5, 7, 3, 1)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layers. `[batch, first] -> [batch, last]`."""
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        return self.layers[-1](x)


class Reader(nn.Module):
    """A model that is given a dictionary and gives one back, as transformers' models do."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(VOCABULARY, 6)
        self.numbers = nn.Linear(3, 6)
        self.out = nn.Linear(6, 2)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Score a dictionary of words `[batch, seq]` and numbers `[batch, 3]`."""
        hidden = torch.relu(self.words(batch["words"]) + self.numbers(batch["numbers"]))
        return {"scores": self.out(hidden), "hidden": hidden}


def tokens(rows: int, seed: int = 0) -> dict[str, Tensor]:
    """Random text: `tokens` and `targets`, both `[rows, seq]`, some of the targets not counting.

    Example:
        >>> batch = tokens(4)
        >>> batch["tokens"].shape, bool((batch["targets"] == IGNORED).any())
        (torch.Size([4, 6]), True)
    """
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(0, VOCABULARY, (rows, CONTEXT + 1), generator=generator)
    targets = text[:, 1:].clone()
    targets[torch.rand(targets.shape, generator=generator) < 0.3] = IGNORED
    return {"tokens": text[:, :-1].clone(), "targets": targets}


def images(rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random images and classes for `ConvNet`."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 3, (rows,), generator=generator)
    return torch.randn(rows, 2, 4, 4, generator=generator), labels


def points(rows: int, seed: int = 0, width: int = 5) -> Tensor:
    """Random inputs for `Mlp`."""
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def pages(rows: int, seed: int = 0) -> dict[str, Tensor]:
    """A random dictionary for `Reader`, with its `labels`."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "words": torch.randint(0, VOCABULARY, (rows, CONTEXT), generator=generator),
        "numbers": torch.randn(rows, 3, generator=generator),
        "labels": torch.randint(0, 2, (rows,), generator=generator),
    }


def next_token(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The summed loss of `Gpt`, and how many targets count: differs from rank to rank."""
    logits = model(batch["tokens"])
    targets = batch["targets"]
    flat = logits.flatten(0, 1), targets.flatten()
    return functional.cross_entropy(*flat, reduction="sum"), (targets != IGNORED).sum()


def mean_next_token(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """The mean loss of `Gpt` over all positions, every row weighing the same."""
    logits = model(batch["tokens"])
    return functional.cross_entropy(logits.flatten(0, 1), batch["targets"].clamp(min=0).flatten())


def classify(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The mean loss of `ConvNet`."""
    return functional.cross_entropy(model(batch[0]), batch[1])


def score(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """The mean loss of `Reader`."""
    return functional.cross_entropy(model(batch)["scores"], batch["labels"])


def square(model: Any, batch: Tensor) -> Tensor:
    """The mean squared output of `Mlp`."""
    return model(batch).square().mean()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW in two groups with settings of their own: matrices decay, the rest does not."""
    rows = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in rows if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in rows if p.ndim <= 1], "weight_decay": 0.0, "lr": 5e-3},
    ]
    return torch.optim.AdamW(groups, lr=1e-2, eps=1e-3)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum over all parameters, frozen ones too."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adafactor(model: nn.Module) -> torch.optim.Optimizer:
    """Adafactor, whose update of a matrix depends on the whole matrix."""
    # torch's divides by the number of elements.
    rows = [p for p in model.parameters() if p.requires_grad and p.numel()]
    # Its first epsilon would follow the dtype, which is another optimizer in another precision.
    return torch.optim.Adafactor(rows, lr=0.02, eps=(1e-6, 1e-3))
