"""Compiled blocks: one graph for equal ones, none broken, and the numbers of eager ones."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallax import Transform, bf16, compile, compose, parse, zero  # noqa: A004
from parallax.testing import World, pool, toys

pytestmark = pytest.mark.ranks

BLOCKS = 24  # three times dynamo's own limit of compiled forms for one function
EAGER = "compile(backend='aot_eager')"


def graphs(texts: list[str], blocks: int = BLOCKS) -> dict[str, Any]:
    """Graphs, frames and breaks of three steps and an evaluation; losses against uncompiled."""
    from torch._dynamo.utils import counters

    found = {}
    for text in texts:
        torch._dynamo.reset()
        counters.clear()
        mine, plain = (_losses(parse(t), blocks) for t in (text, _uncompiled(text)))
        found[text] = (
            counters["stats"]["unique_graphs"],
            counters["frames"]["total"] - counters["frames"]["ok"],
            sum(counters["graph_break"].values()),
            max(abs(a - b) for a, b in zip(mine, plain, strict=True)),
        )
    return found


def _uncompiled(text: str) -> str:
    return ", ".join(str(t) for by, t in parse(text).atoms.items() if not by.startswith("compile"))


def _losses(transform: Transform, blocks: int) -> list[float]:
    torch.manual_seed(0)
    model = toys.Gpt(tied=True, blocks=blocks, dropout=0.1)
    boosted = transform(model, toys.adamw(model))
    rows = [
        float(boosted.train_step(toys.next_token, boosted.shard(toys.tokens(4, step))))
        for step in range(3)
    ]
    return [*rows, float(boosted.eval_step(toys.next_token, boosted.shard(toys.tokens(4))))]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (EAGER, 2),  # training, evaluation
        (f"zero(1), {EAGER}", 2),
        (f"zero(3), bf16, {EAGER}", 2),
        (f"zero(2), {EAGER}, remat()", 2),
        (f"zero(3), {EAGER}, remat(offload=True)", 2),
        (f"zero(3), {EAGER}, remat(keep='matmuls')", 2),
        (f"zero(3), {EAGER}, remat(0.5, keep='matmuls')", 3),  # kept, plain, evaluation
        (f"{EAGER}, remat(budget='100KiB')", 2),
    ],
)
def test_equal_blocks_share_their_graphs_and_none_breaks(text: str, expected: int) -> None:
    (found,) = pool(1).run(graphs, [text])
    unique, failed, breaks, off = found[text]
    assert (unique, failed, breaks) == (expected, 0, 0)
    # aot_eager runs the same kernels; under bf16 its decompositions round otherwise, and 24 blocks
    # and three steps carry that on.
    assert off < (0.05 if "bf16" in text else 1e-6)


def test_cut_blocks_share_their_graphs(world2: World) -> None:
    text = f"tp(2), {EAGER}, remat()"
    for found in world2.run(graphs, [text], 3):
        assert found[text][:3] == (2, 0, 0)
        assert found[text][3] < 1e-6


def broken_graphs() -> int:
    """The same count where hooks of sharding are compiled too, as module.compile() would."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model = toys.Gpt(blocks=2)
    for block in model.blocks:
        block.compile(backend="eager")
    boosted = zero(3)(model, toys.adamw(model))
    boosted.train_step(toys.next_token, toys.tokens(4))
    return sum(counters["graph_break"].values())


def test_a_broken_graph_would_be_counted() -> None:
    assert pool(1).run(broken_graphs)[0] > 0


def kinds(transform: Transform) -> tuple[int, int]:
    """Compiled forms of blocks that all differ, and of other sizes; against the limit."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()

    class Odd(nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.number = number
            self.inner = nn.Sequential(nn.Linear(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.inner(x) * self.number

    torch.manual_seed(0)
    model = nn.Sequential(*(Odd(i) for i in range(BLOCKS)))
    transform(model)
    for rows in (3, 4, 5):
        model(torch.randn(rows, 4)).sum().backward()
    with torch.no_grad():
        model(torch.randn(3, 4))
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def test_unlike_blocks_are_all_compiled_and_not_dropped_at_a_limit() -> None:
    (found,) = pool(1).run(kinds, compile(backend="eager"))
    assert found == (3 * BLOCKS, 0)  # fixed sizes, sizes as symbols, without gradients


def copies() -> tuple[bool, bool, int]:
    """A copied model runs its own weights; each model's compiled code goes with it."""
    torch.manual_seed(0)
    model = toys.Gpt(blocks=2)
    compile(backend="eager")(model)
    before = toys.next_token(model, toys.tokens(2))[0]
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.blocks[0].up.weight.zero_()
    other = toys.next_token(twin, toys.tokens(2))[0]
    again = toys.next_token(model, toys.tokens(2))[0]
    gc.collect()
    return torch.equal(before, again), torch.equal(before, other), len(list(model.state_dict()))


def test_a_copy_of_a_compiled_model_runs_its_own_weights() -> None:
    same, other, _ = pool(1).run(copies)[0]
    assert same
    assert not other


def whole() -> list[Any]:
    """A model without repeated blocks is compiled as one."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    model = toys.Mlp()
    boosted = compose(zero(2), compile(backend="eager", fullgraph=True))(model, toys.adamw(model))
    boosted.train_step(toys.square, boosted.shard(toys.points(8)))
    return [boosted.rooms["compile"].notes["units"], counters["stats"]["unique_graphs"]]


def test_a_model_without_blocks_is_compiled_as_one(world2: World) -> None:
    assert world2.run(whole) == [[[""], 1]] * 2


def inductor(text: str) -> tuple[list[float], list[float]]:
    """Losses with and without compilation; without dropout, whose masks inductor draws itself."""
    rows = []
    for part in (text, _uncompiled(text)):
        torch.manual_seed(0)
        model = toys.Gpt(blocks=2)
        boosted = parse(part)(model, toys.adamw(model))
        losses = [boosted.train_step(toys.next_token, toys.tokens(4, step)) for step in range(2)]
        rows.append([float(loss) for loss in losses])
    return rows[0], rows[1]


@pytest.mark.slow
def test_inductor_computes_the_same() -> None:
    ((mine, plain),) = pool(1).run(inductor, "zero(3), compile(), remat()")
    assert mine == pytest.approx(plain, abs=1e-5)  # float32; fused sums run in another order


def llama_steps(text: str) -> tuple[list[float], int, int]:
    from torch._dynamo.utils import counters
    from transformers import LlamaConfig, LlamaForCausalLM

    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=toys.VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=toys.CONTEXT,
    )
    model = LlamaForCausalLM(config)  # with use_cache, which is transformers' default
    boosted = parse(text)(model, toys.adamw(model))

    def loss(model: Any, batch: dict[str, Tensor]) -> Any:
        return toys.next_token(lambda tokens: model(input_ids=tokens).logits, batch)

    rows = [float(boosted.train_step(loss, boosted.shard(toys.tokens(4, s)))) for s in range(3)]
    stats = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    return rows, *stats


def test_models_of_transformers_with_their_cache(world2: World) -> None:
    pytest.importorskip("transformers")
    plain = world2.run(llama_steps, "tp(2)")[0][0]
    for text in ("tp(2), remat()", "tp(2), remat(0.5)", "tp(2), remat(keep='matmuls')"):
        assert world2.run(llama_steps, text)[0][0] == plain, text
    rows, unique, breaks = world2.run(llama_steps, f"tp(2), {EAGER}, remat()")[0]
    assert (unique, breaks) == (1, 0)
    assert rows == pytest.approx(plain, abs=1e-5)


def test_a_compiled_composition_trains_like_one_process(trains_like_one_process: Any) -> None:
    trains_like_one_process(
        compose(bf16, zero(3)) | parse(f"{EAGER}, remat(0.5)"),
        lambda: toys.Gpt(tied=True, blocks=2),
        toys.adamw,
        toys.next_token,
        [toys.tokens(7)],
        steps=2,
    )
