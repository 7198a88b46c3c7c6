"""Messages at the call, each in full, and the same on every rank."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from parallax import ParallaxError, Transform, bf16, compose, dp, tp, zero
from parallax.testing import pool, toys

pytestmark = pytest.mark.ranks


def call(transform: Transform, model: nn.Module, optimizer: Any = None) -> Any:
    return transform(model, optimizer)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def twice() -> Any:
    model = toys.Mlp()
    zero(2)(model)
    return compose(bf16, dp())(model)


def two_groups() -> Any:
    model = toys.Mlp()
    optimizer = sgd(model)
    optimizer.param_groups.append({**optimizer.param_groups[0], "params": [model.layers[1].weight]})
    return dp()(model, optimizer)


def mixed() -> Any:
    model = toys.Mlp()
    model.layers[1].to(torch.bfloat16)
    return zero(2)(model)


def several_faults() -> Any:
    model = toys.Mlp()
    model.layers[1].to(torch.bfloat16)
    return zero(2, units="Block")(model, sgd(toys.Mlp()))


def train(loss: Callable[[Any, Any], Any]) -> Any:
    model = toys.Mlp()
    return dp()(model, sgd(model)).train_step(loss, toys.points(4))


def loaded(name: str) -> Any:
    folder = Path(tempfile.gettempdir()) / "parallax-messages"
    return dp()(toys.Mlp()).load_(folder / name)


def corrupt() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "index.json").write_text("{")
        try:
            dp()(toys.Mlp()).load_(place)
        except ParallaxError as error:
            raise type(error)(str(error).replace(folder, "FOLDER")) from None


BAD_RULES = {"layers.*": "colwise", "layer.0": "rowwise"}

AT_CALL: dict[str, tuple[int, str, Callable[[], Any], str]] = {
    "leftover ranks": (
        2,
        "MeshError",
        lambda: call(bf16, toys.Mlp()),
        (
            "2 ranks are running, no transform asks for any, and no transform takes the factor of "
            "2 that is left.\n\nAdd zero(2) or dp() to train on different data there, or launch 1 "
            "rank."
        ),
    ),
    "a rule that matches nothing": (
        2,
        "RuleError",
        lambda: call(tp(2, rules={"layer.0": "colwise"}), toys.Mlp(4, 4)),
        (
            "the rule 'layer.0': 'colwise' matches no module of Mlp.\n\nNearest names: layers.*, "
            "layers."
        ),
    ),
    "no rules": (
        2,
        "RuleError",
        lambda: call(tp(2), toys.Mlp(4, 4)),
        (
            "tp has no rules for Mlp, and the model has no tp_plan.\n\n"
            'Give rules: tp(2, rules={"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}).'
        ),
    ),
    "an unknown style": (
        2,
        "RuleError",
        lambda: call(tp(2, rules={"layers.0": "columns"}), toys.Mlp(4, 4)),
        (
            "the rule 'layers.0' asks for the style 'columns', which parallax does not know.\n\n"
            "Styles: colwise, rowwise, colwise_gather_output, rowwise_split_input, "
            "rowwise_scatter_sequence, embedding_rowwise, embedding_colwise, "
            "embedding_rowwise_scatter_sequence, sequence_parallel, "
            "replicated_with_grad_allreduce, "
            "replicate."
        ),
    ),
    "uneven heads": (
        4,
        "RuleError",
        lambda: call(tp(4), toys.Gpt(heads=2)),
        (
            "tp(4) cuts Gpt into 4 parts, and 4 does not divide\n"
            "  blocks.0.attn.num_heads: 2\n"
            "  blocks.1.attn.num_heads: 2\n\n"
            "Degrees that fit every rule: 1, 2."
        ),
    ),
    "uneven sizes": (
        2,
        "RuleError",
        lambda: call(tp(2, rules={"layers.0": "colwise", "layers.1": "rowwise"}), toys.Mlp()),
        (
            "tp(2, rules=(('layers.0', 'colwise'), ('layers.1', 'rowwise'))) cuts Mlp into 2 "
            "parts, and 2 does not divide\n  layers.0.weight, dim 0: 7\n  layers.1.weight, dim 1: "
            "7\n\nDegrees that fit every rule: 1, 7."
        ),
    ),
    "tied weights cut differently": (
        2,
        "RuleError",
        lambda: call(
            tp(2, rules={"head": "colwise", "embed": "embedding_colwise"}), toys.Gpt(tied=True)
        ),
        (
            "head.weight and embed.weight are one tied parameter, and their rules cut it "
            "differently: embed has 'embedding_colwise' and head has 'colwise'.\n\nCut both along "
            "the vocabulary (embedding_rowwise and colwise_gather_output), or neither."
        ),
    ),
    "tied weights of which one is cut": (
        2,
        "RuleError",
        lambda: call(tp(2, rules={"embed": "embedding_rowwise"}), toys.Gpt(tied=True)),
        (
            "head.weight and embed.weight are one tied parameter, and their rules cut it "
            "differently: embed has 'embedding_rowwise' and head has no rule.\n\nCut both along "
            "the vocabulary (embedding_rowwise and colwise_gather_output), or neither."
        ),
    ),
    "boosted twice": (
        2,
        "StepError",
        twice,
        (
            "compose(bf16, dp()) was called on a Mlp that is already boosted by zero(2).\n\n"
            "Compose first, then call once: compose(zero(2), compose(bf16, dp()))(model, "
            "optimizer)."
        ),
    ),
    "optimizer of another model": (
        2,
        "OptimizerError",
        lambda: call(zero(2), toys.Mlp(), sgd(toys.Mlp(3, 2))),
        (
            "the optimizer SGD holds a parameter that is not in the model Mlp: group 0, position "
            "0, shape (2, 3).\n\nMake the optimizer from this model's parameters(), after the "
            "last change to the model and before boosting."
        ),
    ),
    "parameter in two groups": (
        2,
        "OptimizerError",
        two_groups,
        (
            "the parameter layers.1.weight stands twice in the optimizer SGD: in group 0 and in "
            "group 1.\n\nList each parameter in one group."
        ),
    ),
    "mixed dtypes": (
        2,
        "RuleError",
        mixed,
        (
            "the trainable parameters of Mlp have several dtypes (layers.0.weight in float32, "
            "layers.1.weight in bfloat16), and one reduction sums one dtype.\n\nAdd bf16 or fp32, "
            "which keep float32 masters of all, or convert the model to one dtype."
        ),
    ),
    "several faults": (
        2,
        "RuleError",
        several_faults,
        (
            "3 faults:\n\n1. units='Block' matches no module of Mlp.\n\nName a class (Linear, "
            "Mlp, ModuleList) or a pattern such as layers, layers.*.\n\n2. the trainable "
            "parameters of Mlp have several dtypes (layers.0.weight in float32, layers.1.weight "
            "in bfloat16), and one reduction sums one dtype.\n\nAdd bf16 or fp32, which keep "
            "float32 masters of all, or convert the model to one dtype.\n\n3. the optimizer SGD "
            "holds a parameter that is not in the model Mlp: group 0, position 0, shape (7, "
            "5).\n\nMake the optimizer from this model's parameters(), after the last change to "
            "the model and before boosting."
        ),
    ),
    "several faults of rules": (
        2,
        "RuleError",
        lambda: call(tp(2, rules=BAD_RULES), toys.Mlp(4, 4)),
        (
            "the rule 'layer.0': 'rowwise' matches no module of Mlp.\n\nNearest names: layers.*, "
            "layers."
        ),
    ),
    "empty dataset": (
        2,
        "DataError",
        lambda: call(dp(), toys.Mlp()).loader([], batch_size=2),
        (
            "the dataset list is empty.\n\nCheck the path or filter it was made from; a loader "
            "needs at least one sample."
        ),
    ),
    "a batch size that does not divide": (
        4,
        "DataError",
        lambda: call(compose(dp(2), zero(2)), toys.Mlp()).loader([1, 2], batch_size=6),
        (
            "a global batch of 6 samples cannot be shared by 4 data ranks (data_replicate x "
            "data_shard).\n\nUse a multiple of 4: 4 or 8."
        ),
    ),
    "a missing checkpoint": (
        2,
        "CheckpointError",
        lambda: loaded("nothing-here"),
        (
            "no checkpoint at "
            f"{Path(tempfile.gettempdir()) / 'parallax-messages' / 'nothing-here'}: there is no "
            "such directory; beside it: no checkpoint.\n\nGive the directory that boosted.save "
            "wrote."
        ),
    ),
    "a corrupt checkpoint": (
        1,
        "CheckpointError",
        corrupt,
        (
            "the index FOLDER/index.json cannot be read: Expecting property name enclosed in "
            "double quotes: line 1 column 2 (char 1).\n\nThe file is damaged; load another "
            "checkpoint."
        ),
    ),
    "a loss of another form": (
        2,
        "StepError",
        lambda: train(lambda m, x: m(x)),
        (
            "the loss function returned a tensor of shape (4, 1).\n\n"
            "Return the mean loss as a scalar tensor, or the pair (sum, count)."
        ),
    ),
    "rows that disagree": (
        2,
        "DataError",
        lambda: call(dp(), toys.Mlp()).shard({"a": torch.ones(3), "b": torch.ones(4, 2)}),
        (
            "the first dims of the batch's tensors differ (a: 3, b: 4), so it cannot be told how "
            "many samples this rank holds.\n\nGive every tensor the batch as first dim, or let "
            "the loss function return the pair (sum, count)."
        ),
    ),
}


def caught(work: Callable[[], Any]) -> tuple[str, str]:
    """Kind and text of what is raised; an error of another kind is a fault of the package."""
    try:
        work()
    except ParallaxError as error:
        return type(error).__name__, str(error)
    except Exception as error:  # noqa: BLE001
        return type(error).__name__, f"{error}"
    return "", "nothing was raised"


@pytest.mark.parametrize("name", list(AT_CALL))
def test_messages_at_the_call_are_the_same_on_every_rank(name: str) -> None:
    ranks, kind, work, text = AT_CALL[name]
    rows = pool(ranks).run(caught, work)
    assert rows == [(kind, text)] * ranks


def left_alone() -> tuple[bool, bool, list[str]]:
    """A refused call leaves the model, the optimizer and the mark of boosting as they were."""
    model = toys.Mlp()
    optimizer = sgd(model)
    before = list(model.parameters())
    step = optimizer.step
    found = caught(lambda: zero(2, units="Block")(model, optimizer))
    same = all(a is b for a, b in zip(before, model.parameters(), strict=True))
    again = caught(lambda: zero(2)(model, optimizer))
    return same, optimizer.step == step or again[0] == "", [found[0], again[0]]


def test_a_refused_call_changes_nothing() -> None:
    assert pool(2).run(left_alone) == [(True, True, ["RuleError", ""])] * 2


def test_messages_follow_the_house_style() -> None:
    """Neither 'invalid' nor 'will be ignored': what is wrong, and a remedy after a blank line."""
    for _, _, _, text in AT_CALL.values():
        assert "invalid" not in text.lower()
        assert "ignored" not in text
        assert "\n\n" in text
        assert text.endswith((".", ")"))
