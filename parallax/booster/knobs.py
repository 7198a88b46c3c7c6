"""Knobs of the plugins that change nothing here, with the reason: not needed, or not there yet.

A knob at its default is taken. So is a value that asks for what happens anyway. Any other value is
refused with the reason, since a knob that is taken and ignored trains something else than was
asked.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from parallax.errors import ParallaxError


class Knob(NamedTuple):
    """A knob that only takes its default.

    Attributes:
        default: Its value when nothing is said.
        why: Why no other value is taken, to follow "and".
        fix: What to do; None says to leave the knob out.
        also: Further values, which ask for what happens anyway.
    """

    default: Any
    why: str
    fix: str | None = None
    also: tuple[Any, ...] = ()


def later(default: Any, what: str, fix: str | None = None) -> Knob:
    """A knob of a feature that is not there yet; `what` with its verb: "pipelines are"."""
    return Knob(default, f"{what} not there yet", fix)


def faults_of(
    plugin: str, given: Mapping[str, Any], knobs: Mapping[str, Knob]
) -> Iterator[ParallaxError]:
    """What is wrong with the knobs given to a plugin.

    Args:
        plugin: Its name, for messages.
        given: Values by knob.
        knobs: The knobs that only take their default.

    Raises:
        TypeError: The plugin has no knob of a name.

    Example:
        >>> offload = later(False, "offloading to the CPU is")
        >>> for fault in faults_of("Plugin", {"cpu_offload": True}, {"cpu_offload": offload}):
        ...     print(fault)
        Plugin was given cpu_offload=True, and offloading to the CPU is not there yet.
        <BLANKLINE>
        Leave cpu_offload out.
    """
    for name, value in given.items():
        if name not in knobs:
            close = difflib.get_close_matches(name, knobs, n=1)
            hint = f" Did you mean {close[0]}?" if close else ""
            raise TypeError(f"{plugin} has no knob {name!r}.{hint}")
        knob = knobs[name]
        if not any(_same(value, allowed) for allowed in (knob.default, *knob.also)):
            fix = knob.fix or f"Leave {name} out."
            yield ParallaxError(f"{plugin} was given {name}={value!r}, and {knob.why}.\n\n{fix}")


def _same(value: object, allowed: object) -> bool:
    if isinstance(value, bool) or isinstance(allowed, bool) or allowed is None:
        return value is allowed
    return value == allowed


_SCALE = Knob(
    None,
    "scaling the loss belongs to fp16",
    "Leave it out: precision='bf16' needs no loss scale.",
)
_BUCKET = "gradients are reduced unit by unit as the backward reaches them, not in buckets"
_OVERLAP = "gathers and reductions always overlap with computation where the device can"
_CHUNK = "parameters are sharded tensor by tensor with FSDP2, so there are no chunks"
_AUTO = "only static placement is there yet"
_KERNELS = (
    "modules are not replaced here: torch's scaled_dot_product_attention and layer_norm choose "
    "their kernels themselves"
)
_SEQUENCE = "sequence parallelism is"
_PIPELINES = "pipelines are"


def _scaling(initial: float) -> dict[str, Knob]:
    values = {
        "initial_scale": initial,
        "min_scale": 1,
        "growth_factor": 2,
        "backoff_factor": 0.5,
        "growth_interval": 1000,
        "max_scale": 2**32,
    }
    scales = {name: _SCALE._replace(default=value) for name, value in values.items()}
    return scales | {"hysteresis": Knob(2, "the scale is lowered at every overflow", also=(1,))}


_FP8_COMMUNICATION = Knob(
    False,
    "compressing gradients is a transform of its own",
    "Compose it: Booster(plugin=compose(plugin, compress('fp8'))).",
)
_FP8_KNOBS = {
    "fp8_communication": _FP8_COMMUNICATION,
    "use_fp8": Knob(
        False,
        "float8 products are a transform of their own",
        "Compose it: Booster(plugin=compose(plugin, fp8())), with precision='bf16'.",
    ),
}
_COMMON = {
    "norm_type": Knob(
        2.0,
        "another norm is said with the transform",
        "Leave max_norm out and compose it: Booster(plugin=compose(plugin, clip(1.0, "
        "norm_type='inf'))).",
    ),
    "verbose": Knob(False, "nothing is printed", "Read boosted.took_place after a step."),
    "master_weights": Knob(True, "updates are always made on float32 master weights"),
    **_FP8_KNOBS,
}
_COMMUNICATION = {
    "overlap_communication": Knob(True, _OVERLAP),
    "overlap_allgather": Knob(False, _OVERLAP, also=(True,)),
}
_FUSED = {
    "enable_all_optimization": Knob(False, _KERNELS),
    "enable_fused_normalization": Knob(False, _KERNELS),
    "enable_flash_attention": Knob(False, _KERNELS),
    "enable_jit_fused": Knob(False, _KERNELS),
    "enable_sequence_parallelism": later(False, _SEQUENCE),
}
_REDUCER = {
    "broadcast_buffers": Knob(
        True,
        "buffers start as rank 0's and stay alike, since BatchNorm's statistics are those of the "
        "global batch",
    ),
    "find_unused_parameters": Knob(
        False,
        "parameters that no rank uses are always found, and one that only some ranks use in a "
        "step is refused at the update",
    ),
    "check_reduction": Knob(
        False, "a step with gradients that were not reduced is always an error"
    ),
    "gradient_as_bucket_view": Knob(False, _BUCKET),
    "static_graph": Knob(
        False, "nothing is learned from the first steps that a static graph would fix"
    ),
}

DDP: Mapping[str, Knob] = {
    **_REDUCER,
    "bucket_cap_mb": Knob(25, _BUCKET),
    "fp8_communication": _FP8_COMMUNICATION,
}

FSDP: Mapping[str, Knob] = {
    "process_group": Knob(
        None,
        "the groups follow from the mesh",
        "Leave it out; presets.hybrid(stage=3, replicas=...) shards within groups of ranks.",
    ),
    "cpu_offload": later(None, "offloading to the CPU is"),
    "auto_wrap_policy": Knob(
        None,
        "units are found by themselves",
        "Leave it out, or name the units: Booster(plugin=zero(3, units=('Block',))).",
    ),
    "backward_prefetch": Knob(None, _OVERLAP),
    "ignored_modules": later(None, "leaving modules out of sharding is"),
    "param_init_fn": later(None, "building a model on the meta device is"),
    "sync_module_states": Knob(False, "every rank always starts from rank 0's model", also=(True,)),
    "fp8_communication": _FP8_COMMUNICATION,
}

ZERO: Mapping[str, Knob] = {
    **_scaling(2**32),
    **_COMMON,
    **_COMMUNICATION,
    "reduce_bucket_size_in_m": Knob(12, _BUCKET),
    "cpu_offload": later(False, "offloading to the CPU is"),
    "cast_inputs": Knob(True, "floating-point inputs are always cast to the compute dtype"),
}

GEMINI: Mapping[str, Knob] = {
    **_scaling(2**16),
    **_COMMON,
    **_FUSED,
    "chunk_config_dict": Knob(None, _CHUNK),
    "chunk_init_device": Knob(None, _CHUNK),
    "search_range_m": Knob(32, _CHUNK),
    "hidden_dim": Knob(None, _CHUNK),
    "min_chunk_size_m": Knob(32, _CHUNK),
    "placement_policy": later("static", "moving parameters by measured memory is"),
    "warmup_non_model_data_ratio": Knob(0.8, _AUTO),
    "steady_cuda_cap_ratio": Knob(0.9, _AUTO),
    "gpu_margin_mem_ratio": Knob(0.0, _AUTO),
    "memstats": Knob(None, _AUTO),
    "offload_optim_frac": later(0.0, "offloading to the CPU is"),
    "offload_param_frac": later(0.0, "offloading to the CPU is"),
    "pin_memory": Knob(False, "nothing is kept in the host's memory"),
    "max_prefetch": Knob(0, "the next unit is always gathered ahead"),
    "enable_async_reduce": Knob(True, _OVERLAP),
    "enable_gradient_accumulation": Knob(
        False, "gradients always add up until zero_grad", also=(True,)
    ),
    "force_outputs_fp32": Knob(False, "outputs are always float32", also=(True,)),
    "strict_ddp_mode": Knob(False, "every rank always computes the same update"),
}

PIPELINE: Mapping[str, Knob] = {
    "num_microbatches": later(None, _PIPELINES),
    "microbatch_size": later(None, _PIPELINES),
    "pp_style": later("1f1b", _PIPELINES),
    "num_model_chunks": later(1, _PIPELINES),
    "scheduler_nodes": later(None, _PIPELINES),
    "num_layers_per_stage": later(None, _PIPELINES),
    "enable_metadata_cache": later(True, _PIPELINES),
    "overlap_p2p": later(True, _PIPELINES),
}

MOE: Mapping[str, Knob] = {
    **_scaling(2**16),
    **{name: _COMMON[name] for name in ("fp8_communication", "use_fp8")},
    **_COMMUNICATION,
    **_FUSED,
    **_REDUCER,
    **PIPELINE,
    "sp_size": later(None, _SEQUENCE)._replace(also=(1,)),
    "sequence_parallelism_mode": later(None, _SEQUENCE),
    "parallel_output": Knob(
        True, "outputs are always whole, so that any loss may read them", also=(False,)
    ),
    "ddp_bucket_cap_mb": Knob(25, _BUCKET),
    "zero_bucket_size_in_m": Knob(12, _BUCKET),
    "cpu_offload": later(False, "offloading to the CPU is"),
    "gradient_checkpoint_config": Knob(
        None,
        "recomputing activations is a transform of its own",
        "Compose it: Booster(plugin=compose(plugin, remat())).",
    ),
    "make_vocab_size_divisible_by": Knob(
        64, "vocabularies are not padded; one that tp_size does not divide is refused"
    ),
    "overlap_communication": Knob(False, _OVERLAP, also=(True,)),
    "moe_dp_outside": later(True, "expert parallelism is"),
}

HYBRID: Mapping[str, Knob] = {
    **{name: knob for name, knob in MOE.items() if name != "moe_dp_outside"},
    "overlap_communication": Knob(True, _OVERLAP),
    "dp_outside": later(True, _PIPELINES),
    "inner_ring_size": later(None, _SEQUENCE),
}
