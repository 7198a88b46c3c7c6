"""Optimizers of torch and of maintained libraries under sharding, against one process."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from parallax import ParallaxError, Transform, clip, compose, parse
from parallax.core.collect import collect
from parallax.testing import World, toys

pytestmark = pytest.mark.ranks

# float64 on both sides; only the order of sums over ranks differs. Some optimizers round to
# bfloat16 inside (Newton-Schulz, a momentum): a number that lies within 1e-16 of where that
# rounding turns would show, and none does.
CLOSE = 1e-9

Make = Callable[[nn.Module], Optimizer]


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in trained(model) if p.ndim == 2]


def others(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in trained(model) if p.ndim != 2]


def of_torch(name: str, **settings: Any) -> Make:
    return lambda m: getattr(torch.optim, name)(m.parameters(), **settings)


def library(name: str) -> Any:
    """pytorch_optimizer's class of a name, imported where it is used."""
    with warnings.catch_warnings():
        # It imports bitsandbytes and torchao where it finds them, which warn of what they miss.
        warnings.simplefilter("ignore")
        import pytorch_optimizer

    return getattr(pytorch_optimizer, name)


def of_library(name: str, **settings: Any) -> Make:
    return lambda m: library(name)(trained(m), **settings)


def transformers_adafactor(**settings: Any) -> Make:
    def make(model: nn.Module) -> Optimizer:
        from transformers.optimization import Adafactor

        return Adafactor(trained(model), **settings)

    return make


def muon_with_adamw(model: nn.Module) -> Optimizer:
    groups = [
        {"params": matrices(model), "use_muon": True},
        {"params": others(model), "use_muon": False},
    ]
    return library("Muon")(groups)


def galore(model: nn.Module) -> Optimizer:
    low = {"rank": 3, "update_proj_gap": 2, "scale": 0.5, "projection_type": "std"}
    return library("GaLore")([{"params": matrices(model), **low}, {"params": others(model)}])


TABLE: dict[str, tuple[Make, str]] = {
    "SGD": (of_torch("SGD", lr=0.1), "parts"),
    "SGD, nesterov": (of_torch("SGD", lr=0.1, momentum=0.9, nesterov=True), "parts"),
    "Adam": (of_torch("Adam", lr=0.01, amsgrad=True), "parts"),
    "AdamW": (of_torch("AdamW", lr=0.01), "parts"),
    "AdamW, foreach": (of_torch("AdamW", lr=0.01, foreach=True), "parts"),
    "AdamW, fused": (of_torch("AdamW", lr=0.01, fused=True, maximize=True), "parts"),
    "Adamax": (of_torch("Adamax", lr=0.01), "parts"),
    "NAdam": (of_torch("NAdam", lr=0.01, decoupled_weight_decay=True), "parts"),
    "RAdam": (of_torch("RAdam", lr=0.01), "parts"),
    "RMSprop": (of_torch("RMSprop", lr=0.01, centered=True, momentum=0.5), "parts"),
    "Rprop": (of_torch("Rprop", lr=0.01), "parts"),
    "Adagrad": (of_torch("Adagrad", lr=0.01), "parts"),
    "Adadelta": (of_torch("Adadelta", lr=0.1), "parts"),
    "ASGD": (of_torch("ASGD", lr=0.01), "parts"),
    "Muon": (lambda m: torch.optim.Muon(matrices(m), lr=0.02), "whole"),
    "Adafactor": (of_torch("Adafactor", lr=0.01), "whole"),
    "Adafactor, foreach": (of_torch("Adafactor", lr=0.01, foreach=True, maximize=True), "whole"),
    "transformers Adafactor": (transformers_adafactor(), "whole"),
    "transformers Adafactor, fixed": (
        transformers_adafactor(lr=0.01, scale_parameter=False, relative_step=False, beta1=0.9),
        "whole",
    ),
    "pytorch_optimizer Lamb": (of_library("Lamb", lr=0.01, weight_decay=0.1), "whole"),
    "pytorch_optimizer Lamb, rectify": (of_library("Lamb", lr=0.01, rectify=True), "whole"),
    "pytorch_optimizer LARS": (of_library("LARS", lr=0.01), "whole"),
    "pytorch_optimizer CAME": (of_library("CAME", lr=0.01), "whole"),
    "pytorch_optimizer CAME, ams_bound": (of_library("CAME", lr=0.01, ams_bound=True), "whole"),
    "pytorch_optimizer AdaFactor": (of_library("AdaFactor", lr=0.01), "whole"),
    "pytorch_optimizer GaLore": (galore, "parts and whole"),
    "pytorch_optimizer Muon": (muon_with_adamw, "parts and whole"),
    "pytorch_optimizer ScalableShampoo": (of_library("ScalableShampoo", lr=0.01), "whole"),
    "pytorch_optimizer Lion": (of_library("Lion", lr=0.01), "parts"),
}

# Eigenvectors of matrices that lack full rank: the last bit of a gradient decides which, so that
# two runs of one process differ as well. Compared on the very same gradients only.
SENSITIVE: dict[str, tuple[Make, str]] = {
    "pytorch_optimizer Shampoo": (of_library("Shampoo", lr=0.01), "whole"),
    "pytorch_optimizer SOAP": (of_library("SOAP", lr=0.01), "whole"),
}

PLAIN = {"tied": True}
AWKWARD = {"tied": True, "scalar": True, "frozen": True, "unused": True}


def gpt(options: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    return toys.Gpt(blocks=1, **options).double()


def one_process(
    make: Make, options: dict[str, Any], steps: int, bound: float | None
) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, Any]]]:
    """Weights and state after training in this process, on whole batches."""
    model = gpt(options)
    optimizer = make(model)
    for step in range(steps):
        value, count = toys.next_token(model, toys.tokens(5, step))
        (value / count).backward()
        if bound is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), bound)
        optimizer.step()
        model.zero_grad()
    named = dict(model.named_parameters())
    state = {n: dict(optimizer.state[p]) for n, p in named.items() if optimizer.state.get(p)}
    return {n: p.detach() for n, p in named.items()}, state


def far(mine: Any, theirs: Any) -> float:
    """Largest difference, relative to 1 + the value; infinite when one is there only."""
    if isinstance(theirs, torch.Tensor):
        if not isinstance(mine, torch.Tensor) or mine.shape != theirs.shape:
            return math.inf
        gap = (mine.double() - theirs.double()).abs() / (1 + theirs.double().abs())
        return float(gap.max()) if gap.numel() else 0.0
    if isinstance(theirs, list | tuple):
        return max(map(far, mine, theirs), default=0.0)
    if isinstance(theirs, int | float) and not isinstance(theirs, bool):
        return abs(mine - theirs)
    return 0.0 if type(mine) is type(theirs) else math.inf


def apart(boosted: Any, params: dict[str, Any], state: dict[str, dict[str, Any]]) -> float:
    """How far a boosted pair is from one process: weights and state; 0 on ranks but the first."""
    whole = boosted.gather()
    if whole is None:
        return 0.0
    assert set(whole["params"]) == set(params)
    assert {n: set(row) for n, row in whole["moments"].items()} == {
        n: set(row) for n, row in state.items()
    }
    rows = [far(whole["params"][n], p) for n, p in params.items()]
    rows += [far(whole["moments"][n][k], v) for n, row in state.items() for k, v in row.items()]
    return max(rows)


def all_of(
    transform: Transform, names: list[str], options: dict[str, Any], bound: float | None = None
) -> dict[str, tuple[float, str]]:
    found = {}
    for name in names:
        make, _ = TABLE[name]
        model = gpt(options)
        boosted = transform(model, make(model))
        for step in range(3):
            boosted.train_step(toys.next_token, boosted.shard(toys.tokens(5, step)))
        reference = one_process(make, options, 3, bound)
        found[name] = apart(boosted, *reference), boosted.rooms["optimizer"].notes["way"]
    return found


def judge(rows: list[dict[str, tuple[float, str]]]) -> None:
    wrong = {n: error for row in rows for n, (error, _) in row.items() if not error < CLOSE}
    assert wrong == {}
    for row in rows:
        assert {n: way for n, (_, way) in row.items()} == {n: TABLE[n][1] for n in row}


@pytest.mark.parametrize("text", ["zero(2)", "tp(2)"])
def test_every_optimizer_steps_like_one_process(text: str, world2: World) -> None:
    judge(world2.run(all_of, parse(text), list(TABLE), PLAIN))


FEW = [
    "AdamW",
    "Adafactor",
    "pytorch_optimizer Lamb",
    "pytorch_optimizer CAME",
    "pytorch_optimizer Muon",
    "pytorch_optimizer GaLore",
]


@pytest.mark.parametrize("text", ["zero(3), tp(2)", "dp(2), zero(1)"])
def test_meshes_of_two_axes(text: str, world4: World) -> None:
    judge(world4.run(all_of, parse(text), FEW, PLAIN))


def test_awkward_parameters_and_a_bound_on_gradients(world2: World) -> None:
    transform = compose(parse("zero(3)"), clip(0.05))
    judge(world2.run(all_of, transform, FEW, AWKWARD, 0.05))


def on_the_same_gradients(transform: Transform, names: list[str]) -> dict[str, float]:
    """Largest difference of weights when one process is given the ranks' own gradients."""
    found = {}
    for name in names:
        make, _ = (TABLE | SENSITIVE)[name]
        torch.manual_seed(0)
        model, alone = toys.Gpt(blocks=1).float(), toys.Gpt(blocks=1).float()
        alone.load_state_dict(model.state_dict())
        boosted, optimizer = transform(model, make(model)), make(alone)
        for step in range(3):
            boosted.grad(toys.next_token, boosted.shard(toys.tokens(5, step)))
            grads = collect(boosted.grads, boosted.mesh)
            boosted.update()
            boosted.zero_grad()
            for parameter_name, p in alone.named_parameters() if grads is not None else ():
                p.grad = grads[parameter_name]
            optimizer.step()
        whole = boosted.gather()
        rows = dict(alone.named_parameters()).items() if whole is not None else ()
        found[name] = max((far(whole["params"][n], p.detach()) for n, p in rows), default=0.0)
    return found


def test_whole_steps_are_bitwise_those_of_one_process(world2: World) -> None:
    names = [n for n, (_, way) in (TABLE | SENSITIVE).items() if way == "whole"]
    for row in world2.run(on_the_same_gradients, parse("zero(2)"), names):
        assert {name: gap for name, gap in row.items() if gap} == {}


class Wide(nn.Module):
    """A layer large enough for blocks of quantised state, which shards cut in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(90, 128), nn.Linear(128, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def eight_bits(kind: str) -> tuple[float, str, str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns of kernels that it has for other machines
        import torchao.optim

    make = getattr(torchao.optim, kind)
    torch.manual_seed(0)
    model, alone = Wide(), Wide()
    alone.load_state_dict(model.state_dict())
    with torch.compiler.set_stance("force_eager"):  # compiling would take most of the time
        optimizer = make(alone.parameters(), lr=1e-2)
        boosted = parse("zero(3)")(model, make(model.parameters(), lr=1e-2))
        for step in range(3):
            boosted.grad(toys.square, boosted.shard(toys.points(6, step, width=90)))
            grads = collect(boosted.grads, boosted.mesh)
            boosted.update()
            boosted.zero_grad()
            for name, p in alone.named_parameters() if grads is not None else ():
                p.grad = grads[name]
            optimizer.step()
    whole = boosted.gather()
    rows = dict(alone.named_parameters()).items() if whole is not None else ()
    gap = max((far(whole["params"][n], p.detach()) for n, p in rows), default=0.0)
    return gap, boosted.rooms["optimizer"].notes["way"], refusal(lambda: boosted.save("nowhere"))


def refusal(work: Callable[[], Any]) -> str:
    try:
        work()
    except ParallaxError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


@pytest.mark.parametrize("kind", ["AdamW8bit"])
def test_blocks_of_eight_bits_are_those_of_the_whole(kind: str, world2: World) -> None:
    for gap, way, text in world2.run(eight_bits, kind):
        assert (gap, way) == (0.0, "whole")
        assert text == (
            f"CheckpointError: the optimizer {kind} keeps a OptimState8bit as exp_avg of "
            "up.weight, and a checkpoint holds plain tensors, numbers and text.\n\n"
            "Use an optimizer whose state is plain, or save the rest: "
            "boosted.save(directory, "
            "kinds=('params', 'buffers', 'rooms', 'step'))."
        )


def planted(fault: str) -> float:
    """Train with a fault in the exchange; how far from one process."""
    make, _ = TABLE["pytorch_optimizer Lamb"]
    model = gpt(PLAIN)
    boosted = parse("zero(2)")(model, make(model))
    exchange = boosted.rooms["optimizer"].notes["binding"]._exchange
    move = exchange._exchange

    def swapped(sent: list[Any], wanted: list[Any]) -> None:
        """Two tensors of one size change places on their way."""
        pairs = [i for i in range(1, len(sent)) if sent[i][1].shape == sent[i - 1][1].shape]
        if pairs and dist.get_rank() == 1:
            i = pairs[0]
            sent = [*sent[: i - 1], sent[i], sent[i - 1], *sent[i + 1 :]]
        move(sent, wanted)

    def left_out(sent: list[Any], wanted: list[Any]) -> None:
        """The last tensor that rank 0 receives is dropped."""
        if wanted and dist.get_rank() == 0:
            rank, target = wanted[-1]
            wanted = [*wanted[:-1], (rank, target.clone())]
        move(sent, wanted)

    exchange._exchange = {"swapped": swapped, "left out": left_out, "none": move}[fault]
    for step in range(2):
        boosted.train_step(toys.next_token, boosted.shard(toys.tokens(5, step)))
    return apart(boosted, *one_process(make, PLAIN, 2, None))


@pytest.mark.parametrize("fault", ["swapped", "left out"])
def test_a_fault_in_the_exchange_is_seen(fault: str, world2: World) -> None:
    assert max(world2.run(planted, fault)) > 1e-4
    assert max(world2.run(planted, "none")) < CLOSE
