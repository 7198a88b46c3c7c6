"""verify on models as they come, with no change to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from parallax.parse import parse
from parallax.testing import toys, verify

transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")

pytestmark = pytest.mark.ranks

VOCABULARY = 32


class Classifier(nn.Module):
    """torch's own encoder with a head, dropout at its default of 0.1."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        layer = nn.TransformerEncoderLayer(16, nhead=4, dim_feedforward=32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=2)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(x)).mean(dim=1))


class Tied(nn.Module):
    """A user's language model: tied weights and a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, 12)
        self.mix = nn.ModuleList(nn.GRU(12, 12, batch_first=True) for _ in range(2))
        self.lm_head = nn.Linear(12, VOCABULARY, bias=False)
        self.lm_head.weight = self.wte.weight
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        h = self.wte(x)
        for layer in self.mix:
            h = h + layer(h)[0]
        return self.lm_head(h) / self.temperature


def focal(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    logits, targets = model(batch["tokens"]).flatten(0, 1), batch["targets"].flatten()
    keep = targets != toys.IGNORED
    nll = functional.cross_entropy(logits, targets.clamp(min=0), reduction="none")
    return ((1 - (-nll).exp()).square() * nll * keep).sum(), keep.sum()


def classify(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch["tokens"]), batch["tokens"][:, 0] % 3)


def own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The loss that transformers' models compute inside; every row has as many targets."""
    ids = batch["tokens"]
    return model(input_ids=ids, labels=ids).loss


def _tiny(name: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        config = getattr(transformers, f"{name}Config")(**options)
        suffix = {"Bert": "ForMaskedLM", "T5": "ForConditionalGeneration", "GPT2": "LMHeadModel"}
        return getattr(transformers, name + suffix.get(name, "ForCausalLM"))(config)

    return make


DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "use_cache": False,
}
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any]]] = {
    "torch's TransformerEncoder": (Classifier, classify),
    "tied": (Tied, focal),
    "Llama": (_tiny("Llama", **DECODER), own_loss),
    "Qwen3": (_tiny("Qwen3", **DECODER, head_dim=4), own_loss),
    "GPT2": (
        _tiny("GPT2", vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=4, use_cache=False),
        own_loss,
    ),
    "Bert": (
        _tiny(
            "Bert",
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
        ),
        own_loss,
    ),
    "T5": (
        _tiny(
            "T5",
            vocab_size=VOCABULARY,
            d_model=16,
            d_ff=32,
            d_kv=4,
            num_layers=2,
            num_heads=4,
            use_cache=False,
            decoder_start_token_id=0,
        ),
        own_loss,
    ),
    "Mixtral": (  # grouped_mm, the default, has no float64 kernel.
        _tiny(
            "Mixtral",
            **DECODER,
            num_local_experts=4,
            num_experts_per_tok=2,
            experts_implementation="eager",
        ),
        own_loss,
    ),
}
COMPOSITIONS = ["zero(2), bf16, clip(0.05)", "dp(2), zero(3, degree=2)"]
CUT = [("Llama", "tp(2), zero(2), bf16, clip(0.05)"), ("Qwen3", "tp(2), zero(3)")]


@pytest.mark.parametrize(
    ("name", "text"), [(name, text) for name in MODELS for text in COMPOSITIONS] + CUT
)
def test_a_model_trains_like_one_process(name: str, text: str) -> None:
    make, loss = MODELS[name]
    batches = [toys.tokens(8, seed) for seed in range(2)]
    report = verify(parse(text), make, toys.adamw, loss, batches, steps=2)
    assert report.ok, report


def test_the_convolutional_net_trains_like_one_process() -> None:
    batches = [toys.images(7, seed) for seed in range(2)]
    text = parse("dp(2), zero(2, degree=2), bf16, clip(0.05)")
    report = verify(text, toys.ConvNet, toys.momentum, toys.classify, batches, steps=2)
    assert report.ok, report
