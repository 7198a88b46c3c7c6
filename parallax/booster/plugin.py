"""ColossalAI's plugins as functions that return compositions.

Knobs that do something here are named in the signatures. All others of that API are known: see
`parallax.booster.knobs` and the tables in `docs/migrating.md`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, cast

import torch

from parallax import presets
from parallax.booster.knobs import (
    DDP,
    FSDP,
    GEMINI,
    HYBRID,
    MOE,
    PIPELINE,
    ZERO,
    Knob,
    faults_of,
)
from parallax.booster.precision import (
    DTYPES,
    policy_faults,
    precision_of,
    reduction_faults,
)
from parallax.booster.preset import Preset
from parallax.core.transform import Transform, compose
from parallax.errors import ParallaxError, raise_all
from parallax.store.facts import Dtype

_STRATEGIES = {None: 3, "FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0}


def TorchDDPPlugin(**knobs: Any) -> Preset:  # noqa: N802  (the plugins keep their API's names)
    """Copies of the model on different data: `dp()`.

    It says nothing of precision; `Booster(mixed_precision="bf16", plugin=TorchDDPPlugin())` does.

    Args:
        **knobs: The knobs of this plugin in ColossalAI, which change nothing here.

    Raises:
        ParallaxError: A knob asks for something that is not there; every such knob is listed.

    Example:
        >>> TorchDDPPlugin()
        dp()
    """
    raise_all(faults_of("TorchDDPPlugin", knobs, DDP))
    return _preset(presets.ddp())


def TorchFSDPPlugin(  # noqa: N802
    *, sharding_strategy: Any = None, mixed_precision: Any = None, **knobs: Any
) -> Preset:
    """Parameters, gradients and optimizer state sharded over all ranks: `zero(3)`.

    Args:
        sharding_strategy: torch's `ShardingStrategy` or its name: FULL_SHARD is `zero(3)`,
            SHARD_GRAD_OP `zero(2)`, NO_SHARD `dp()`.
        mixed_precision: torch's `MixedPrecision`: `param_dtype` is the compute dtype,
            `reduce_dtype` that of the gradient sum (`param_dtype` when unsaid, as in torch).
        **knobs: The other knobs of this plugin in ColossalAI, which change nothing here.

    Raises:
        ParallaxError: A knob asks for something that is not there; every such knob is listed.

    Example:
        >>> TorchFSDPPlugin(sharding_strategy="SHARD_GRAD_OP")
        zero(2)
    """
    who = "TorchFSDPPlugin"
    faults = list(faults_of(who, knobs, FSDP))
    strategy = getattr(sharding_strategy, "name", sharding_strategy)
    if strategy not in _STRATEGIES:
        faults.append(
            ParallaxError(
                f"{who} was given sharding_strategy={strategy!r}, and it knows FULL_SHARD, "
                "SHARD_GRAD_OP and NO_SHARD.\n\nFor copies of each shard (HYBRID_SHARD) say how "
                "many: Booster(plugin=presets.hybrid(stage=3, replicas=2))."
            )
        )
    compute: Dtype | None = None
    reduce: Dtype | None = None
    if mixed_precision is not None:
        faults += policy_faults(who, mixed_precision)
        compute = DTYPES.get(mixed_precision.param_dtype or torch.float32)
        reduce = DTYPES.get(mixed_precision.reduce_dtype) or compute
    raise_all(faults)
    stage = cast(Literal[0, 2, 3], _STRATEGIES[strategy])
    return _preset(presets.hybrid(stage=stage, compute=compute, reduce=reduce))


def LowLevelZeroPlugin(  # noqa: N802
    stage: int = 1,
    precision: str = "fp16",
    *,
    max_norm: float = 0.0,
    communication_dtype: torch.dtype | None = None,
    extra_dp_size: int = 1,
    **knobs: Any,
) -> Preset:
    """Optimizer state, and from stage 2 gradients, sharded over the data ranks: `zero(stage)`.

    Args:
        stage: 1 or 2.
        precision: `"bf16"`, `"fp32"`, or `"fp16"` with the knobs of its loss scale:
            `mixed_precision("fp16", scale=initial_scale, ...)`.
        max_norm: Bound on the global gradient norm: `clip(max_norm)`; 0 leaves gradients as they
        are.
        communication_dtype: `torch.float32` (what None means) or `torch.bfloat16` for the gradient
        sum.
        extra_dp_size: Copies of each shard: `dp(extra_dp_size)`.
        **knobs: The other knobs of this plugin in ColossalAI, which change nothing here.

    Raises:
        ParallaxError: A knob asks for something that is not there; every such knob is listed.

    Example:
        >>> LowLevelZeroPlugin(stage=2, precision="bf16", max_norm=1.0)
        compose(bf16, clip(1.0), zero(2))
    """
    who = "LowLevelZeroPlugin"
    reduce = DTYPES.get(communication_dtype)
    computing, knobs, faults = precision_of(who, precision, knobs, reduce=reduce)
    faults += faults_of(who, knobs, ZERO)
    faults += reduction_faults(who, communication_dtype)
    if stage not in (1, 2):
        faults.append(
            ParallaxError(
                f"{who} was given stage={stage!r}, and it knows 1 and 2.\n\nFor sharded parameters "
                "use GeminiPlugin(precision='bf16') or Booster(plugin=zero(3))."
            )
        )
    raise_all(faults)
    sharding = presets.hybrid(
        stage=cast(Literal[1, 2], stage), replicas=extra_dp_size, max_norm=max_norm
    )
    return _preset(compose(sharding, computing))


def GeminiPlugin(  # noqa: N802
    *,
    precision: str = "fp16",
    shard_param_frac: float = 1.0,
    max_norm: float = 0.0,
    tp_size: int = 1,
    extra_dp_size: int = 1,
    **knobs: Any,
) -> Preset:
    """Parameters, gradients and optimizer state sharded over the data ranks: `zero(3)`.

    Args:
        precision: `"bf16"`, `"fp32"`, or `"fp16"` with the knobs of its loss scale:
            `mixed_precision("fp16", scale=initial_scale, ...)`.
        shard_param_frac: 1.0 shards all parameters (`zero(3)`), 0.0 none (`zero(2)`).
        max_norm: Bound on the global gradient norm: `clip(max_norm)`; 0 leaves gradients as they
        are.
        tp_size: Ranks that cut the layers, by the model's own `tp_plan`: `tp(tp_size)`.
        extra_dp_size: Copies of each shard: `dp(extra_dp_size)`.
        **knobs: The other knobs of this plugin in ColossalAI, which change nothing here.

    Raises:
        ParallaxError: A knob asks for something that is not there; every such knob is listed.

    Example:
        >>> GeminiPlugin(precision="bf16", tp_size=2)
        compose(bf16, tp(2), zero(3))
    """
    who = "GeminiPlugin"
    computing, knobs, faults = precision_of(who, precision, knobs)
    faults += faults_of(who, knobs, GEMINI)
    if shard_param_frac not in (0.0, 1.0):
        faults.append(
            ParallaxError(
                f"{who} was given shard_param_frac={shard_param_frac!r}, and sharding a fraction "
                "of the parameters is not there yet.\n\nUse 1.0 (all) or 0.0 (none)."
            )
        )
    raise_all(faults)
    sharding = presets.hybrid(
        stage=3 if shard_param_frac else 2,
        replicas=extra_dp_size,
        tensor=tp_size,
        max_norm=max_norm,
    )
    return _preset(compose(sharding, computing))


def HybridParallelPlugin(  # noqa: N802
    tp_size: int,
    pp_size: int,
    *,
    precision: str = "fp16",
    zero_stage: int = 0,
    max_norm: float = 0.0,
    communication_dtype: torch.dtype | None = None,
    custom_policy: Mapping[str, str] | None = None,
    **knobs: Any,
) -> Preset:
    """Tensor parallelism beside data parallelism: `tp(tp_size)` with `dp()` or `zero(zero_stage)`.

    Args:
        tp_size: Ranks that share one batch and cut the layers.
        pp_size: Pipeline stages; 1, until pipelines are there.
        precision: `"bf16"`, `"fp32"`, or `"fp16"` with the knobs of its loss scale:
            `mixed_precision("fp16", scale=initial_scale, ...)`.
        zero_stage: 0 (`dp()`), 1 or 2 (`zero(zero_stage)`).
        max_norm: Bound on the global gradient norm: `clip(max_norm)`; 0 leaves gradients as they
        are.
        communication_dtype: `torch.float32` (what None means) or `torch.bfloat16` for the gradient
        sum.
        custom_policy: How modules are cut, as rules of `tp`: style by name pattern. None takes the
            model's own `tp_plan`.
        **knobs: The other knobs of this plugin in ColossalAI, which change nothing here.

    Raises:
        ParallaxError: A knob asks for something that is not there; every such knob is listed.

    Example:
        >>> HybridParallelPlugin(tp_size=2, pp_size=1, zero_stage=1, precision="bf16")
        compose(bf16, tp(2), zero(1))
    """
    return _hybrid(
        "HybridParallelPlugin",
        HYBRID,
        knobs,
        tp_size=tp_size,
        pp_size=pp_size,
        precision=precision,
        zero_stage=zero_stage,
        max_norm=max_norm,
        communication_dtype=communication_dtype,
        custom_policy=custom_policy,
    )


def MoeHybridParallelPlugin(  # noqa: N802
    tp_size: int,
    pp_size: int,
    ep_size: int,
    *,
    precision: str = "fp16",
    zero_stage: int = 0,
    max_norm: float = 0.0,
    communication_dtype: torch.dtype | None = None,
    custom_policy: Mapping[str, str] | None = None,
    **knobs: Any,
) -> Preset:
    """`HybridParallelPlugin` with expert parallelism, once that is there.

    Args:
        tp_size: Ranks that share one batch and cut the layers.
        pp_size: Pipeline stages; 1, until pipelines are there.
        ep_size: Ranks that share out the experts; 1, until expert parallelism is there.
        precision: `"bf16"`, `"fp16"` or `"fp32"`.
        zero_stage: 0 (`dp()`), 1 or 2 (`zero(zero_stage)`).
        max_norm: Bound on the global gradient norm; 0 leaves gradients as they are.
        communication_dtype: `torch.float32` (what None means) or `torch.bfloat16` for the gradient
        sum.
        custom_policy: How modules are cut, as rules of `tp`.
        **knobs: The other knobs of this plugin in ColossalAI, which change nothing here.

    Raises:
        ParallaxError: A knob asks for something that is not there; every such knob is listed.

    Example:
        >>> MoeHybridParallelPlugin(1, 1, 1, zero_stage=2, precision="bf16")
        compose(bf16, zero(2))
    """
    who = "MoeHybridParallelPlugin"
    experts = Knob(1, "expert parallelism is not there yet", "Use ep_size=1 until then.")
    return _hybrid(
        who,
        {**MOE, "ep_size": experts},
        {"ep_size": ep_size, **knobs},
        tp_size=tp_size,
        pp_size=pp_size,
        precision=precision,
        zero_stage=zero_stage,
        max_norm=max_norm,
        communication_dtype=communication_dtype,
        custom_policy=custom_policy,
    )


def _hybrid(
    who: str,
    known: Mapping[str, Knob],
    knobs: Mapping[str, Any],
    *,
    tp_size: int,
    pp_size: int,
    precision: str,
    zero_stage: int,
    max_norm: float,
    communication_dtype: torch.dtype | None,
    custom_policy: Mapping[str, str] | None,
) -> Preset:
    faults: list[ParallaxError] = []
    if pp_size != 1:
        faults.append(
            ParallaxError(
                f"{who} was given pp_size={pp_size!r}, and pipelines are not there yet.\n\n"
                "Use pp_size=1 until then, with the ranks in tp_size or left to the data axis."
            )
        )
        # What belongs to pipelines is the same fault once more.
        knobs = {name: value for name, value in knobs.items() if name not in PIPELINE}
    reduce = DTYPES.get(communication_dtype)
    computing, knobs, wrong = precision_of(who, precision, knobs, reduce=reduce)
    faults += wrong
    faults += faults_of(who, knobs, known)
    faults += reduction_faults(who, communication_dtype)
    if zero_stage not in (0, 1, 2):
        faults.append(
            ParallaxError(
                f"{who} was given zero_stage={zero_stage!r}, and it knows 0, 1 and 2.\n\nFor "
                "sharded parameters use GeminiPlugin(tp_size=..., precision='bf16')."
            )
        )
    if custom_policy is not None and not isinstance(custom_policy, Mapping):
        faults.append(
            ParallaxError(
                f"{who} was given custom_policy={custom_policy!r}, and modules are cut by "
                "rules.\n\nGive a mapping of name patterns to styles, for instance "
                "{'blocks.*.up': 'colwise', 'blocks.*.down': 'rowwise'}; see parallax.tp."
            )
        )
    raise_all(faults)
    sharding = presets.hybrid(
        stage=cast(Literal[0, 1, 2], zero_stage),
        tensor=tp_size,
        rules=custom_policy,
        max_norm=max_norm,
    )
    return _preset(compose(sharding, computing))


def _preset(transform: Transform) -> Preset:
    return Preset(transform.claims)
