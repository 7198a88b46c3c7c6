"""parallax: composable functional transforms for distributed PyTorch training."""

import importlib
from typing import TYPE_CHECKING, Any

# transforms
from parallax.blocks import compile, remat  # noqa: A004  (what one says aloud)
from parallax.core.axes import Axes, Fill, layout

# the algebra
from parallax.core.fact import Claim, Fact
from parallax.core.phase import Phase
from parallax.core.plan import Plan
from parallax.core.rewrite import Draft, Rewrite, Room
from parallax.core.transform import Transform, compose, override, part, state

# errors
from parallax.errors import (
    CheckpointError,
    ConflictError,
    DataError,
    LaunchError,
    MeshError,
    OptimizerError,
    ParallaxError,
    RenameError,
    RuleError,
    StepError,
)

# the world
from parallax.launch import launch, launch_from_torch
from parallax.parse import parse
from parallax.step import accumulate, clip, ema, schedules
from parallax.store import bf16, compress, dp, fp16, fp32, mixed_precision, shard_zero, zero
from parallax.surgery import fp8
from parallax.tensor import tensor_parallel, tp

if TYPE_CHECKING:
    from parallax.checkpoint.load import load
    from parallax.core.boosted import Boosted
    from parallax.core.step import MicroBatches
    from parallax.testing.verify import verify

# These need DTensor, whose import costs half as much as torch's: see parallax.core.late.
_LATE = {
    "Boosted": "parallax.core.boosted",
    "MicroBatches": "parallax.core.step",
    "load": "parallax.checkpoint.load",
    "verify": "parallax.testing.verify",
}


def __getattr__(name: str) -> Any:
    if name in _LATE:
        return getattr(importlib.import_module(_LATE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__version__ = "0.1.0"

__all__ = [
    "Axes",
    "Boosted",
    "CheckpointError",
    "Claim",
    "ConflictError",
    "DataError",
    "Draft",
    "Fact",
    "Fill",
    "LaunchError",
    "MeshError",
    "MicroBatches",
    "OptimizerError",
    "ParallaxError",
    "Phase",
    "Plan",
    "RenameError",
    "Rewrite",
    "Room",
    "RuleError",
    "StepError",
    "Transform",
    "accumulate",
    "bf16",
    "clip",
    "compile",
    "compose",
    "compress",
    "dp",
    "ema",
    "fp8",
    "fp16",
    "fp32",
    "launch",
    "launch_from_torch",
    "layout",
    "load",
    "mixed_precision",
    "override",
    "parse",
    "part",
    "remat",
    "schedules",
    "shard_zero",
    "state",
    "tensor_parallel",
    "tp",
    "verify",
    "zero",
]
