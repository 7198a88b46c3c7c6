"""A run that was saved and loaded goes on as the one that never stopped, bit for bit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import optree
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import Dataset

import parallax
from parallax import parse
from parallax.core.slices import local
from parallax.testing import World, pool, toys
from parallax.testing.laws import MODELS, Case, cases, name_of

pytestmark = pytest.mark.ranks


def start(case: Case, seed: int) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    options = dict(case.options)
    if case.model == "Gpt":
        options["dropout"] = 0.2
    model = MODELS[case.model][0](**options)
    boosted = case.transform(model, getattr(toys, case.optimizer)(model))
    schedule = parallax.schedules.cosine(boosted.optimizer, steps=8, warmup=2)
    return boosted, boosted.attach(schedule)


def train(case: Case, boosted: Any, schedule: Any, *steps: int) -> list[float]:
    losses = []
    for step in steps:
        batch = boosted.shard(MODELS[case.model][1](case.rows, step))
        losses.append(float(boosted.train_step(getattr(toys, case.loss), batch)))
        schedule.step()
    return losses


def state(boosted: Any, schedule: Any) -> list[torch.Tensor]:
    """Everything, as this rank has it."""
    leaves = optree.tree_leaves(boosted, namespace="parallax")
    tensors = [local(x).detach().clone() for x in leaves if isinstance(x, torch.Tensor)]
    rates = torch.tensor([group["lr"] for group in boosted.optimizer.param_groups])
    return [*tensors, rates, torch.tensor(schedule.last_epoch), torch.rand(3)]


def stopped_and_not(case: Case, directory: str, kinds: Any = None) -> tuple[Any, Any]:
    """Losses and state at the end: of the run that went through, and of the one that did not."""
    boosted, schedule = start(case, 0)
    train(case, boosted, schedule, 0, 1)
    boosted.save(directory)
    through = train(case, boosted, schedule, 2, 3), state(boosted, schedule)
    again, other = start(case, 1)
    train(case, again, other, 7)  # a state of its own, which has to go
    again.load_(directory, **({"kinds": kinds} if kinds else {}))
    return through, (train(case, again, other, 2, 3), state(again, other))


def same(one: Any, other: Any) -> bool:
    return one[0] == other[0] and (
        len(one[1]) == len(other[1])
        and all(torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))
    )


def assert_exact(case: Case, directory: Path) -> None:
    for one, other in pool(case.world).run(stopped_and_not, case, str(directory)):
        assert one[0] == other[0]
        assert same(one, other)


@pytest.mark.slow
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases(dtypes=("native",)))
def test_any_composition_resumes_bit_for_bit(case: Case, tmp_path_factory: Any) -> None:
    """With dropout, a schedule, and everything that the composition keeps, in its own precision."""
    assert_exact(case, tmp_path_factory.mktemp("exact") / "c")


def case_of(world: int, *parts: str, **options: Any) -> Case:
    told: dict[str, Any] = {"optimizer": "adamw", "loss": "next_token", "rows": 8}
    return Case(world, parts, "Gpt", (("tied", True),), dtype="native", **{**told, **options})


CASES = {
    "fp16 with its scale": case_of(2, "zero(2)", "fp16", "clip(0.05, nonfinite='skip')"),
    "averages": case_of(2, "zero(3)", "bf16", "ema(0.9)"),
    "compressed gradients": case_of(2, "dp()", "compress('fp8')"),
    "both axes": case_of(4, "tp(2)", "zero(3)", "bf16", "clip(0.05)"),
    "whole matrices": case_of(2, "zero(2)", optimizer="adafactor"),
}


@pytest.mark.parametrize("name", CASES)
def test_what_compositions_keep_is_kept(name: str, tmp_path: Path) -> None:
    assert_exact(CASES[name], tmp_path / "c")


@pytest.mark.parametrize("kind", ["moments", "rooms", "random", "attached"])
def test_each_kind_of_state_would_be_missed(kind: str, tmp_path: Path) -> None:
    kinds = tuple(k for k in parallax.core.state.KINDS if k != kind)
    case = CASES["averages"]
    for one, other in pool(case.world).run(stopped_and_not, case, str(tmp_path / "c"), kinds):
        assert not same(one, other)


# -- with a loader ---------------------------------------------------------------------------------


class Numbers(Dataset[Any]):
    """Samples with noise, which workers draw."""

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((5,), index / 22) + torch.rand(5) + random.random()


def epochs(boosted: Any, loader: Any, steps: int) -> list[float]:
    losses: list[float] = []
    while len(losses) < steps:
        for batch in loader:
            losses.append(float(boosted.train_step(toys.square, batch)))
            if len(losses) == steps:
                break
    return losses


def with_loader(directory: str, workers: int, late: bool) -> tuple[list[float], list[float]]:
    def begin(seed: int) -> tuple[Any, Any]:
        torch.manual_seed(seed)
        random.seed(seed)
        model = toys.Mlp()
        boosted = parse("zero(2)")(model, toys.momentum(model))
        return boosted, lambda: boosted.loader(
            Numbers(), batch_size=4, shuffle=True, seed=1, num_workers=workers
        )

    boosted, make = begin(0)
    loader = make()
    losses: list[float] = []
    for batch in loader:
        losses.append(float(boosted.train_step(toys.square, batch)))
        if len(losses) == 3:
            boosted.save(directory)
        if len(losses) == 5:
            break
    other, make = begin(1)
    again = None if late else make()
    other.load_(directory)
    return losses[3:], epochs(other, again or make(), 2)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_goes_on_in_the_middle_of_its_epoch(
    workers: int, late: bool, world2: World, tmp_path: Path
) -> None:
    """The same batches with the same noise, whether the loader is made before or after loading."""
    for through, resumed in world2.run(with_loader, str(tmp_path / "c"), workers, late):
        assert through == resumed


def no_loader(directory: str) -> str:
    model = toys.Mlp()
    boosted = parse("zero(2)")(model, toys.momentum(model))
    boosted.load_(directory)
    try:
        boosted.train_step(toys.square, boosted.shard(toys.points(4)))
    except parallax.StepError as error:
        return str(error)
    return "nothing was raised"


def test_a_place_in_the_data_is_not_forgotten(world2: World, tmp_path: Path) -> None:
    world2.run(with_loader, str(tmp_path / "c"), 0, False)
    for text in world2.run(no_loader, str(tmp_path / "c")):
        assert text.startswith("the checkpoint holds the state of loader, and nothing of that name")


# -- any composition to any other ------------------------------------------------------------------

LAYOUT = {"tp", "zero", "dp", "remat", "compile"}
"""Members that say how a step is computed, and nothing of what."""

MEANING = {"clip", "ema", "accumulate"}
"""Members that say what a step is: both runs have them. The rest rounds, which float64 does not."""


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Case, Case]:
    """The same training under two compositions, in float64."""
    one, other = draw(cases(dtypes=("fp64",))), draw(cases(dtypes=("fp64",)))
    meaning = tuple(p for p in one.parts if name_of(p) in MEANING)
    optimizer, rows = draw(st.sampled_from(["adamw", "momentum"])), one.rows

    def made(case: Case) -> Case:
        layout = tuple(p for p in case.parts if name_of(p) in LAYOUT)
        parts = (*layout, *meaning, "mixed_precision('fp64')")
        options = (("tied", True), ("scalar", True), ("blocks", 2), ("counts", False))
        told = {"optimizer": optimizer, "loss": "next_token", "rows": rows}
        return Case(case.world, parts, "Gpt", options, dtype="fp64", **told)

    return made(one), made(other)


def begin(case: Case, seed: int) -> Any:
    torch.manual_seed(seed)
    model: nn.Module = toys.Gpt(**dict(case.options)).double()
    return case.transform(model, getattr(toys, case.optimizer)(model))


def steps(case: Case, boosted: Any, *numbers: int) -> list[float]:
    return [
        float(boosted.train_step(toys.next_token, boosted.shard(toys.tokens(case.rows, n))))
        for n in numbers
    ]


def first_half(case: Case, directory: str) -> None:
    boosted = begin(case, 0)
    steps(case, boosted, 0, 1)
    boosted.save(directory)


def second_half(case: Case, directory: str | None) -> tuple[list[float], Any]:
    boosted = begin(case, 1 if directory else 0)
    if directory:
        boosted.load_(directory)
    else:
        steps(case, boosted, 0, 1)
    losses = steps(case, boosted, 2, 3)
    return losses, boosted.gather()


@pytest.mark.slow
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pair=pairs())
def test_any_to_any_of_the_law_suite(pair: tuple[Case, Case], tmp_path_factory: Any) -> None:
    """Saved under one drawn composition and world, loaded under another: one process's training."""
    one, other = pair
    directory = str(tmp_path_factory.mktemp("pair") / "c")
    pool(one.world).run(first_half, one, directory)
    losses, whole = pool(other.world).run(second_half, other, directory)[0]
    meaning = tuple(p for p in one.parts if name_of(p) not in LAYOUT)
    alone = Case(1, meaning, "Gpt", one.options, one.optimizer, one.loss, one.rows)
    expected, reference = pool(1).run(second_half, alone, None)[0]
    # float64; four steps whose sums are in another order, of AdamW with eps 1e-3 or SGD, and
    # numbers below 10: a few hundred roundings of 1e-16. A lost moment moves the loss by 1e-8.
    assert losses == pytest.approx(expected, abs=1e-11)
    ours, theirs = (
        optree.tree_flatten_with_path({k: w[k] for k in ("params", "buffers", "moments", "rooms")})
        for w in (whole, reference)
    )
    assert ours[0] == theirs[0]
    for path, mine, its in zip(ours[0], ours[1], theirs[1], strict=True):
        torch.testing.assert_close(mine, its, rtol=0, atol=1e-11, msg=lambda m, p=path: f"{p}: {m}")


# -- other dtypes ----------------------------------------------------------------------------------


def into_bfloat16(directory: str) -> list[str]:
    """A model of bfloat16 takes what a model of float32 saved: rounded once, moments too."""
    torch.manual_seed(0)
    model = toys.Mlp()
    wide = parse("zero(3)")(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    wide.train_step(toys.square, wide.shard(toys.points(4)))
    wide.save(directory)
    model = toys.Mlp().bfloat16()
    narrow = parse("zero(3)")(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    narrow.load_(directory)
    faults = []
    for name, parameter in wide.params.items():
        if not torch.equal(local(parameter).bfloat16(), local(narrow.params[name])):
            faults.append(name)
        for slot, value in wide.moments[name].items():
            mine = narrow.moments[name][slot]
            wanted = value if slot == "step" else value.bfloat16()
            if mine.dtype != wanted.dtype or not torch.equal(local(mine), local(wanted)):
                faults.append(f"{name}.{slot}")
    narrow.train_step(lambda m, b: m(b.bfloat16()).square().mean(), narrow.shard(toys.points(4)))
    return faults


def test_another_dtype_rounds_once(world2: World, tmp_path: Path) -> None:
    assert world2.run(into_bfloat16, str(tmp_path / "c")) == [[], []]


# -- generators ------------------------------------------------------------------------------------


def draws() -> tuple[Any, ...]:
    return random.random(), float(np.random.rand()), float(np.random.normal()), torch.rand(2)


def all_generators(directory: str) -> bool:
    torch.manual_seed(0)
    random.seed(5)
    np.random.seed(6)
    np.random.normal()  # numpy and Python keep the second of a pair of Gaussian numbers
    random.gauss(0, 1)
    boosted = parse("dp()")(toys.Mlp())
    boosted.save(directory)
    one, gauss = draws(), random.gauss(0, 1)
    boosted.load_(directory)
    other = draws()
    return one[:3] == other[:3] and torch.equal(one[3], other[3]) and gauss == random.gauss(0, 1)


def test_generators_of_python_numpy_and_torch_come_back(world2: World, tmp_path: Path) -> None:
    assert world2.run(all_generators, str(tmp_path / "c")) == [True, True]


def streams(text: str, directory: str, save: bool) -> list[float]:
    torch.manual_seed(0)
    boosted = parse(text)(toys.Gpt())
    if save:
        torch.rand(5)
        boosted.save(directory)
    else:
        boosted.load_(directory)
    return torch.rand(2).tolist()


def test_ranks_take_the_streams_of_their_place_in_the_data(tmp_path: Path) -> None:
    """Ranks of one tensor group draw alike, data ranks unlike, as many as there are."""
    path = str(tmp_path / "c")
    saved = pool(4).run(streams, "tp(2), dp(2)", path, True)
    assert saved[0] == saved[1] != saved[2] == saved[3]
    assert pool(2).run(streams, "dp()", path, False) == [saved[0], saved[2]]
    assert pool(1).run(streams, "dp()", path, False) == [saved[0]]
    more = pool(4).run(streams, "dp()", path, False)
    assert more[:2] == [saved[0], saved[2]]
    assert len({tuple(row) for row in more}) == 4
