"""A unit's forward, recomputed or not, and what torch has to be asked in private for it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import optree
import torch
from torch import Tensor, nn
from torch.autograd import Function

# What tensor parallelism hands on before it has arrived; it has no public name.
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from parallax.errors import StepError

if TYPE_CHECKING:
    from parallax.blocks.offload import Shelf
    from parallax.blocks.trial import Trial

CACHES = ("past_key_values", "past_key_value", "layer_past", "cache", "use_cache")
"""What transformers' layers call a cache of keys and values, and the wish for one."""

MATMULS = frozenset(
    f"aten::{name}"
    for name in (
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "convolution",
        "_scaled_mm",
        "_grouped_mm",
        "_scaled_grouped_mm",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_fused_attention_overrideable",
    )
)
"""Operations whose arithmetic outgrows their result. Collectives are kept beside them."""


class Unit:
    """Stands in for a unit's `forward`, and recomputes it in the backward if told so.

    In the place of the instance's forward: names stay, and every hook on the unit, of which
    fully_shard has several, stays outside. A recomputation then finds its parameters gathered.

    Attributes:
        name: The unit's name in the model.
        forward: The forward that is run; COMPILE puts the compiled one here.
        kept: With `keep`, what COMPILE made of the recomputed forward: compiled code has to keep
            results of its operations by itself.
        recompute: Whether this unit is recomputed.
        trial: Measures the unit before its next forward; None when nothing is to be known.
    """

    def __init__(
        self, name: str, module: nn.Module, *, recompute: bool, keep: bool, shelf: Shelf | None
    ) -> None:
        functools.update_wrapper(self, module.forward)  # its signature is read by trainers
        self.name = name
        self.module = module
        self.forward: Callable[..., Any] = module.forward
        self.kept: Callable[..., Any] | None = None
        self.recompute = recompute
        self.keep = keep
        self.trial: Trial | None = None
        self._shelf = shelf

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The unit's forward."""
        # Without gradients nothing is kept anyway; in evaluation mode a cache may be wanted.
        cached = any(kwargs.get(name) not in (None, False) for name in CACHES)
        if not torch.is_grad_enabled() or (cached and not self.module.training):
            return self.forward(*args, **kwargs)
        kwargs = self._without_cache(kwargs)
        if self.trial is not None:
            self.trial.measure(self, args, kwargs)
        if not self.recompute:
            return self.forward(*args, **kwargs)
        if self.kept is not None:
            return self.kept(*args, **kwargs)
        return self._recomputed(args, kwargs)

    def _recomputed(self, args: Any, kwargs: Any) -> Any:
        # Flat, since checkpoint looks for devices whose random state to keep, and for inputs to
        # save, among positional tensors only; a unit may be called by keywords alone.
        call: Any = (args, kwargs)
        leaves, tree = optree.tree_flatten(call, none_is_leaf=True)
        before = Before(self.module)

        def run(*leaves: Any) -> Any:
            args, kwargs = optree.tree_unflatten(tree, leaves)
            out = self.forward(*args, **kwargs)
            before.forget_unchanged()
            return out

        def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
            if not self.keep:
                return nullcontext(), before.replay()
            first, again = create_selective_checkpoint_contexts(_keep_matmuls)
            return first, _both(before.replay(), again)

        shelf = nullcontext() if self._shelf is None else self._shelf.of_unit(self.name, leaves)
        with shelf:
            return checkpoint(run, *leaves, use_reentrant=False, context_fn=contexts)

    def _without_cache(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Keywords with which no cache is filled: a recomputation would fill it again."""
        found = [name for name in CACHES if kwargs.get(name) not in (None, False)]
        for name in found:
            length = getattr(kwargs[name], "get_seq_length", None)
            if length is not None and length():
                raise StepError(
                    f"{self.name} was given a key/value cache that holds {length()} positions "
                    "while training, and a recomputed unit would fill it again.\n\nTrain without "
                    "past_key_values, or leave remat out."
                )
        blank = {name: False if kwargs[name] is True else None for name in found}
        return {**kwargs, **blank} if found else kwargs


def recomputed_keeping(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A forward that keeps what `keep="matmuls"` names, as one function to compile.

    Compiled code is opaque to the modes by which torch keeps results, so the recomputation has to
    be part of the graph. Buffers need no care there: graphs change them once, at their end.
    """
    return checkpoint(forward, *args, use_reentrant=False, context_fn=_keeping, **kwargs)


def _keep_matmuls(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = op.name().partition(".")[0]
    # Sending again costs what sending costs; waiting again for what has arrived costs nothing.
    sent = name.startswith("_c10d_functional::") and not name.endswith(("wait_tensor", "_"))
    return (
        CheckpointPolicy.MUST_SAVE if sent or name in MATMULS else CheckpointPolicy.PREFER_RECOMPUTE
    )


_keeping = functools.partial(create_selective_checkpoint_contexts, _keep_matmuls)


@contextmanager
def _both(*contexts: AbstractContextManager[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


class Before:
    """The buffers of a module before its forward.

    A recomputation starts from them and leaves no trace: a running statistic counts once, and what
    depends on a buffer that the forward changes (a spectral norm) comes out the same.

    Args:
        module: The module about to run.
    """

    def __init__(self, module: nn.Module) -> None:
        self._held = [
            (part, [(name, b, b._version, b.detach().clone()) for name, b in _buffers(part)])
            for part in module.modules()
            if any(True for _ in _buffers(part))
        ]
        self._looked = False

    def forget_unchanged(self) -> None:
        """After the first run: keep the values of modules that changed a buffer, drop the rest."""
        if self._looked:
            return
        self._looked = True
        # By module, not by buffer: batch_norm's kernels change statistics behind autograd's back,
        # but the counter beside them is changed in the open.
        self._held = [
            (part, rows)
            for part, rows in self._held
            if any(getattr(part, name) is not b or b._version != seen for name, b, seen, _ in rows)
        ]

    @contextmanager
    def replay(self) -> Iterator[None]:
        """Put copies of the values from before in place, and afterwards what was there."""
        present = [(part, dict(_buffers(part))) for part, _ in self._held]
        try:
            for part, rows in self._held:
                for name, _, _, value in rows:
                    setattr(part, name, value.clone())
            yield
        finally:
            for part, buffers in present:
                for name, buffer in buffers.items():
                    setattr(part, name, buffer)


def _buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return module.named_buffers(recurse=False, remove_duplicate=False)


class _Arrived(Function):
    """A tensor that is on its way, once it is there."""

    @staticmethod
    def forward(ctx: Any, x: AsyncCollectiveTensor) -> Tensor:  # type: ignore[override]
        return x.wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


def arrived(x: Any) -> Any:
    """A value as compiled code can take it.

    A tensor on its way would be another kind of input, with a graph of its own, and its gradient
    would pass by the collective that sent it.
    """
    return _Arrived.apply(x) if isinstance(x, AsyncCollectiveTensor) else x


def allow_graphs(count: int) -> None:
    """Let one function have so many compiled forms.

    Past its limit dynamo runs a function uncompiled, for ever, and only logs it. The limit is the
    process's; it is raised, never lowered.
    """
    import torch._dynamo  # seconds; torch.compiler.config has these names too, but not in 2.11

    config: Any = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, count)
    total = config.accumulated_recompile_limit
    config.accumulated_recompile_limit = max(total, config.recompile_limit)
