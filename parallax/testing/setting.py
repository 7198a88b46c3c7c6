"""What is verified: a model, its optimizer, its loss and its batches, the same in every process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import optree
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

Check = Literal["fp64", "fp32", "native"]


@dataclass(frozen=True)
class Setting:
    """A training run to verify, as functions that any process can call.

    Attributes:
        model_fn: Makes the model; the same weights for the same seed.
        optimizer_fn: Makes the optimizer from the model; None verifies gradients only.
        loss_fn: `loss_fn(model, batch)`: mean loss or `(sum, count)`.
        batches: Global batches, one a step.
        dtype: In which precision it is checked.
        seed: Seed of the models.
    """

    model_fn: Callable[[], nn.Module]
    optimizer_fn: Callable[[nn.Module], Optimizer] | None
    loss_fn: Callable[[Any, Any], Any]
    batches: Sequence[Any]
    dtype: Check
    seed: int = 0

    def model(self, seed: int | None = None) -> nn.Module:
        """The model, in the dtype of the check."""
        torch.manual_seed(self.seed if seed is None else seed)
        model = self.model_fn()
        return model.to(torch.float64) if self.dtype == "fp64" else model

    def batch(self, step: int, *, wide: bool = False) -> Any:
        """The global batch of a step; its floating-point tensors in float64 when `wide`."""
        batch = self.batches[step % len(self.batches)]
        return widen(batch) if wide or self.dtype == "fp64" else batch


def widen(tree: Any) -> Any:
    """A tree with its floating-point tensors in float64."""

    def cast(x: Any) -> Any:
        return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x

    return optree.tree_map(cast, tree, none_is_leaf=True)


class NoDropout(TorchFunctionMode):
    """Switches dropout off wherever it is called from, and nothing else.

    A mask cannot be the same in one process and on cut activations, so runs are compared without;
    that data ranks would draw different masks is compared by itself. Training mode stays on, since
    it also decides, for instance, which statistics a BatchNorm uses.
    """

    _FUNCTIONS = frozenset(
        {
            torch.dropout,
            nn.functional.dropout,
            nn.functional.dropout1d,
            nn.functional.dropout2d,
            nn.functional.dropout3d,
            nn.functional.alpha_dropout,
            nn.functional.feature_alpha_dropout,
        }
    )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in self._FUNCTIONS:
            return args[0] if args else kwargs["input"]
        if func is nn.functional.scaled_dot_product_attention and len(args) > 4:
            args = (*args[:4], 0.0, *args[5:])
        elif func is nn.functional.multi_head_attention_forward and len(args) > 11:
            args = (*args[:10], 0.0, *args[11:])
        if "dropout_p" in kwargs:
            kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)


def quiet() -> ExitStack:
    """The surroundings in which runs are compared."""
    stack = ExitStack()
    stack.enter_context(NoDropout())
    return stack
