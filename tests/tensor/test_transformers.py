"""transformers' own models with their own plans for tensor parallelism, unchanged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallax import compose, parse
from parallax.core.slices import local
from parallax.testing import World, toys
from parallax.testing.verify import verify

pytest.importorskip("transformers")
pytestmark = pytest.mark.ranks

SIZES: dict[str, Any] = {
    "vocab_size": toys.VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": toys.CONTEXT,
    "use_cache": False,
}


def llama(*, tied: bool = False) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=tied))


def qwen3() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=4, tie_word_embeddings=True))


def tied_llama() -> nn.Module:
    return llama(tied=True)


def loss(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return toys.next_token(lambda tokens: model(input_ids=tokens).logits, batch)


@pytest.mark.parametrize("model_fn", [llama, tied_llama, qwen3])
@pytest.mark.parametrize("text", ["tp(2)", "tp(2), zero(3), clip(0.5)", "tp(2), zero(2), bf16"])
def test_models_train_like_one_process(
    text: str, model_fn: Any, world2: World, world4: World
) -> None:
    report = verify(
        parse(text),
        model_fn,
        toys.adamw,
        loss,
        [toys.tokens(4, step) for step in range(2)],
        world=world2 if text == "tp(2)" else world4,
        steps=2,
        dtype="native" if "bf16" in text else "fp64",
        blame=False,
    )
    assert report.ok, str(report)


def shares(model_fn: Any) -> tuple[int, int]:
    model = model_fn()
    whole = sum(p.numel() for p in model.parameters())
    boosted = compose(parse("tp(2)"))(model)
    return whole, sum(local(p).numel() for p in boosted.params.values())


def test_the_plan_cuts_nearly_all_of_the_model(world2: World) -> None:
    """Only the norms are whole, and the head's own plan leaves the embedding out."""
    for whole, mine in world2.run(shares, qwen3):
        assert mine < 0.55 * whole


def tail(model_fn: Any, text: str) -> float:
    """One row for two data ranks: one of them holds none."""
    torch.manual_seed(0)
    model = model_fn()
    boosted = parse(text)(model, toys.momentum(model))
    return float(boosted.train_step(loss, boosted.shard(toys.tokens(1))))


@pytest.mark.parametrize("text", ["zero(2)", "dp()"])
def test_a_rank_without_rows_neither_fails_nor_hangs(text: str, world2: World) -> None:
    """The last batch of an epoch may hold fewer rows than there are data ranks."""
    torch.manual_seed(0)
    total, count = loss(llama(), toys.tokens(1))
    expected = float((total / count).detach())
    # float32 on both sides: a few roundings of 6e-8 of a loss near 3.
    assert world2.run(tail, llama, text) == [pytest.approx(expected, abs=1e-5)] * 2


def saved_dictionary() -> dict[str, float]:
    """A batch as transformers' tokenizers and collators make it."""
    from transformers import BatchEncoding

    torch.manual_seed(0)
    model = llama()
    boosted = parse("zero(2)")(model, toys.momentum(model))
    rows = toys.tokens(3)
    batch = BatchEncoding({"input_ids": rows["tokens"], "labels": rows["tokens"]})
    part = boosted.shard(batch)
    value = boosted.train_step(lambda m, b: m(**b).loss, part)
    return {"rows": float(len(part["input_ids"])), "loss": float(value)}


def test_batch_encodings_are_cut_and_weighed(world2: World) -> None:
    torch.manual_seed(0)
    text = toys.tokens(3)["tokens"]
    expected = float(llama()(input_ids=text, labels=text).loss.detach())
    rows = world2.run(saved_dictionary)
    assert [row["rows"] for row in rows] == [2, 1]
    assert [row["loss"] for row in rows] == [pytest.approx(expected, abs=1e-5)] * 2
