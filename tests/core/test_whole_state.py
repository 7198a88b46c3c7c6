"""State of optimizers that are stepped whole: at one rank, and yet saved, loaded, shown as ever."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
from torch import nn

from parallax import parse
from parallax.checkpoint import read_index
from parallax.core.collect import collect
from parallax.core.probe import find_ways, optimizer_fault
from parallax.testing import World, pool, toys
from tests.core.test_all_optimizers import (
    CLOSE,
    PLAIN,
    SENSITIVE,
    TABLE,
    apart,
    gpt,
    library,
    one_process,
    refusal,
)

pytestmark = pytest.mark.ranks
KINDS = ["Adafactor", "pytorch_optimizer CAME", "pytorch_optimizer Lamb", "pytorch_optimizer Muon"]
PATH = ["zero(2)", "", "tp(2)", "zero(3), tp(2)", "zero(1)"]


def train(boosted: Any, steps: Any) -> None:
    for step in steps:
        boosted.train_step(toys.next_token, boosted.shard(toys.tokens(5, step)))


def boost(text: str, name: str) -> Any:
    model = gpt(PLAIN)
    return parse(text)(model, TABLE[name][0](model))


def leg(text: str, place: int, directory: str) -> dict[str, float]:
    """Load what the last composition saved, train one step, save; compare with one process."""
    found = {}
    for name in KINDS:
        boosted = boost(text, name)
        here = Path(directory) / name.replace(" ", "-")
        if place:
            boosted.load_(here)
        train(boosted, [place])
        boosted.save(here)
        found[name] = apart(boosted, *one_process(TABLE[name][0], PLAIN, place + 1, None))
    return found


def test_a_run_goes_on_under_any_other_composition(
    world2: World, world4: World, tmp_path: Path
) -> None:
    sizes = {"": pool(1), "zero(3), tp(2)": world4}
    for place, text in enumerate(PATH):
        for row in sizes.get(text, world2).run(leg, text, place, str(tmp_path)):
            assert {name: gap for name, gap in row.items() if not gap < CLOSE} == {}
    for name in KINDS:
        index = read_index(tmp_path / name.replace(" ", "-"))
        assert all(len(t.pieces) == 1 for k, t in index.tensors.items() if k.endswith("_row"))


def clone(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def snapshot(name: str) -> tuple[float, bool]:
    boosted = boost("zero(2)", name)
    train(boosted, [0])
    kept = optree.tree_map(clone, boosted, namespace="parallax")
    first = kept.gather()
    train(boosted, [5, 6])
    boosted.load_(kept)
    train(boosted, [1, 2])
    return apart(boosted, *one_process(TABLE[name][0], PLAIN, 3, None)), first is not None


def state_dict(name: str, whole: bool) -> float:
    """Through the optimizer's own state dict: a rank's own, or that of one process on all ranks."""
    boosted, again = boost("zero(2)", name), boost("zero(2)", name)
    train(boosted, [0])
    kept = copy.deepcopy(boosted.optimizer.state_dict())
    if whole:
        model = gpt(PLAIN)
        optimizer = TABLE[name][0](model)
        value, count = toys.next_token(model, toys.tokens(5, 0))
        (value / count).backward()
        optimizer.step()
        kept = optimizer.state_dict()
    again.write_({"params": boosted.params, "buffers": {}, "rooms": {}}, kinds=("params",))
    again.optimizer.load_state_dict(kept)
    train(again, [1, 2])
    return apart(again, *one_process(TABLE[name][0], PLAIN, 3, None))


def earlier(name: str) -> float:
    """Boosted after a step alone."""
    model = gpt(PLAIN)
    optimizer = TABLE[name][0](model)
    value, count = toys.next_token(model, toys.tokens(5, 0))
    (value / count).backward()
    optimizer.step()
    model.zero_grad()
    boosted = parse("zero(3)")(model, optimizer)
    train(boosted, [1, 2])
    return apart(boosted, *one_process(TABLE[name][0], PLAIN, 3, None))


@pytest.mark.parametrize("name", KINDS)
def test_snapshots_state_dicts_and_earlier_state(name: str, world2: World) -> None:
    assert [row[1] for row in world2.run(snapshot, name)] == [True, False]
    assert max(row[0] for row in world2.run(snapshot, name)) < CLOSE
    assert max(world2.run(state_dict, name, False)) < CLOSE
    if TABLE[name][1] == "whole":  # parts of a state dict of wholes cannot be told from wholes
        assert max(world2.run(state_dict, name, True)) < CLOSE
    assert max(world2.run(earlier, name)) < CLOSE


def held() -> tuple[dict[str, int], set[str], int, list[int], bool]:
    boosted = boost("zero(2)", "pytorch_optimizer CAME")
    train(boosted, range(2))
    mine = boosted.moments
    shown = {id(p) for p in boosted.model.parameters()}
    numbers = sum(
        v.numel() for row in mine.values() for v in row.values() if isinstance(v, torch.Tensor)
    )
    counts = [group["step"] for group in boosted.optimizer.param_groups]
    return boosted.owners, set(mine), numbers, counts, {*map(id, boosted.optimizer.state)} <= shown


def test_each_rank_holds_the_state_of_what_it_owns(world2: World) -> None:
    (owners, mine, one, counts, shown), (same, theirs, two, others, also) = world2.run(held)
    assert owners == same
    assert mine == {name for name, rank in owners.items() if rank == 0}
    assert theirs == {name for name, rank in owners.items() if rank == 1}
    assert 0.8 < one / two < 1.25
    assert counts == others == [2]
    assert shown
    assert also


def nothing_owned() -> tuple[list[int], int]:
    """A group of one parameter: one rank owns all of it, and both count its steps."""
    model = gpt({})
    rows = list(model.parameters())
    boosted = parse("zero(2)")(model, library("Lamb")([{"params": rows[:1]}, {"params": rows[1:]}]))
    train(boosted, range(3))
    return [g["step"] for g in boosted.optimizer.param_groups], boosted.step


def test_counts_in_groups_go_on_where_a_rank_owns_nothing(world2: World) -> None:
    assert world2.run(nothing_owned) == [([3, 3], 3)] * 2


def projectors() -> str:
    boosted = boost("zero(2)", "pytorch_optimizer GaLore")
    train(boosted, [0])
    return refusal(lambda: boosted.save("nowhere"))


def test_objects_in_the_state_are_refused_when_saved(world2: World) -> None:
    for text in world2.run(projectors):
        assert text == (
            "CheckpointError: the optimizer GaLore keeps a GaLoreProjector as projector of "
            "positions, and a checkpoint holds plain tensors, numbers and text.\n\nUse an "
            "optimizer whose state is plain, or save the rest: boosted.save(directory, "
            "kinds=('params', 'buffers', 'rooms', 'step'))."
        )


def notes(text: str, name: str) -> dict[str, Any]:
    found = boost(text, name).rooms["optimizer"].notes
    return {key: found[key] for key in ("way", "ways", "owners", "traffic")}


def test_what_was_chosen_can_be_read(world2: World) -> None:
    for row in world2.run(notes, "zero(2)", "AdamW"):
        assert row == {"way": "parts", "ways": ("parts",), "owners": {}, "traffic": 0}
    elements = sum(p.numel() for p in gpt(PLAIN).parameters())
    first, second = world2.run(notes, "zero(2)", "Adafactor")
    assert first == second
    assert first["way"] == "whole"
    assert set(first["owners"].values()) == {0, 1}
    # Half of all is at its owner already: weights and gradients there, weights back, 8 bytes each.
    assert abs(first["traffic"] / (1.5 * elements * 8) - 1) < 0.2


class Counting(torch.optim.Optimizer):
    """Normalises each gradient, and counts steps in groups that have parameters only."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"count": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad / p.grad.norm())
            group["count"] += bool(group["params"])


REMEDY = (
    "use an element-wise optimizer (AdamW, SGD, ...) or one that treats each parameter by itself, "
    "or replicate with dp(), or, if {0} computes rightly on DTensors, say so with a class "
    "attribute supports_dtensor = True."
)
OTHERS = (
    "changes a parameter differently when it steps others beside it (by a norm or an estimate over "
    "all of them, or by random numbers that it draws), and each rank would step other ones.\n\n"
    "Turn that off in its settings (in place of a global clip of its own, compose clip(max_norm)), "
    "or "
)
SPARSE = (
    "could not be tried on a small tensor (RuntimeError: SparseAdam does not support dense "
    "gradients, please consider Adam instead).\n\nInstead, "
)
COMPANY = (
    "counts its steps only where a group has parameters, and a rank may own none of a "
    "group.\n\nInstead, "
)


def of(name: str, **settings: Any) -> Any:
    return lambda parameters: library(name)(parameters, **settings)


REFUSED: dict[str, tuple[Any, str]] = {
    "Lamb": (of("Lamb", pre_norm=True), OTHERS),
    "Prodigy": (of("Prodigy"), OTHERS),
    "DAdaptAdam": (of("DAdaptAdam"), OTHERS),
    "Kron": (of("Kron"), OTHERS),
    "SparseAdam": (torch.optim.SparseAdam, SPARSE),
    "Counting": (Counting, COMPANY),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_cannot_be_exact_is_refused_with_the_reason(name: str) -> None:
    make, finding = REFUSED[name]
    fault = optimizer_fault(make(list(toys.Mlp().parameters())), "zero(2)")
    assert str(fault) == (
        f"zero(2) shards parameters, and the optimizer {name} {finding}{REMEDY.format(name)}"
    )


def refused_before_anything_is_changed() -> tuple[str, bool]:
    model = toys.Mlp()
    optimizer = library("Lamb")(model.parameters(), pre_norm=True)
    text = refusal(lambda: parse("zero(2)")(model, optimizer))
    return text, type(next(model.parameters())) is nn.Parameter


def test_the_remedies_work(world2: World) -> None:
    for text, untouched in world2.run(refused_before_anything_is_changed):
        assert text.startswith("OptimizerError: zero(2) shards parameters, and the optimizer Lamb")
        assert untouched
    assert find_ways(library("Lamb")(list(toys.Mlp().parameters()))).fault is None
    assert world2.run(replicated) == [True, True]


def replicated() -> bool:
    boosted = parse("dp()")(model := gpt(PLAIN), library("Prodigy")(model.parameters()))
    train(boosted, [0])
    return bool(collect(boosted.params, boosted.mesh)) == (dist.get_rank() == 0)


def added_later() -> tuple[float, bool]:
    """A group added after boosting is stepped whole too, and owners of the others stay."""
    model, alone = gpt({}), gpt({})
    rows, theirs = list(model.parameters()), list(alone.parameters())
    boosted = parse("zero(2)")(model, torch.optim.Adafactor(rows[2:]))
    optimizer = torch.optim.Adafactor(theirs[2:])
    train(boosted, [0])
    before = dict(boosted.owners)
    boosted.optimizer.add_param_group({"params": list(boosted.model.parameters())[:2]})
    train(boosted, [1, 2])
    for step in range(3):
        if step == 1:
            optimizer.add_param_group({"params": theirs[:2]})
        value, count = toys.next_token(alone, toys.tokens(5, step))
        (value / count).backward()
        optimizer.step()
        alone.zero_grad()
    named = {n: p.detach() for n, p in alone.named_parameters()}
    state = {n: dict(optimizer.state[p]) for n, p in alone.named_parameters()}
    return apart(boosted, named, state), before.items() <= boosted.owners.items()


def test_groups_may_be_added_later(world2: World) -> None:
    for gap, stay in world2.run(added_later):
        assert gap < CLOSE
        assert stay


def broken() -> tuple[str, bool]:
    """A step that raises leaves groups and state as they were shown."""
    boosted = boost("zero(2)", "Adafactor")
    train(boosted, [0])
    shown = [list(g["params"]) for g in boosted.optimizer.param_groups]
    boosted.optimizer.param_groups[0]["beta2_decay"] = "none"
    boosted.grad(toys.next_token, boosted.shard(toys.tokens(5, 1)))
    try:
        boosted.update()
    except TypeError as error:
        told = type(error).__name__
    same = all(
        a is b
        for g, row in zip(boosted.optimizer.param_groups, shown, strict=True)
        for a, b in zip(g["params"], row, strict=True)
    )
    return told, same and set(boosted.moments) <= set(boosted.params)


def test_a_step_that_raises_restores_what_is_shown(world2: World) -> None:
    assert world2.run(broken) == [("TypeError", True)] * 2


def test_the_page_on_optimizers_names_every_one_that_is_tested() -> None:
    page = (Path(__file__).parents[2] / "docs" / "optimizers.md").read_text().splitlines()
    rows = [line.split("|")[1:5] for line in page if line.startswith("| ")]
    wanted = [(n, way) for n, (_, way) in (TABLE | SENSITIVE).items()]
    wanted += [(name, "refused") for name in REFUSED if name != "Counting"]
    for spoken, way in wanted:
        name = spoken.partition(",")[0].split()[-1]
        ways = {w for w in way.split(" and ") if w in ("parts", "whole", "refused")}
        found = [row for row in rows if name in row[0].replace(",", " ").split()]
        assert any(all(w in row[2] for w in ways) for row in found), spoken
