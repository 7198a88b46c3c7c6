"""Plugins are compositions, and every knob of theirs does something or is refused with a reason."""

from __future__ import annotations

import inspect
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy

import parallax
from parallax import (
    ConflictError,
    ParallaxError,
    Transform,
    bf16,
    clip,
    compose,
    dp,
    fp16,
    fp32,
    mixed_precision,
    presets,
    tp,
    zero,
)
from parallax.booster import Booster, knobs
from parallax.booster.plugin import (
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    MoeHybridParallelPlugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)


def words(text: str) -> list[str]:
    return text.split()


BF16: dict[str, Any] = {"precision": "bf16"}
HALVES: dict[str, Any] = {"tp_size": 2, "pp_size": 1, "precision": "bf16"}
RULES = {"up": "colwise", "down": "rowwise"}
NAMED: dict[str, Any] = {
    "TorchDDPPlugin": (TorchDDPPlugin, knobs.DDP, {}),
    "TorchFSDPPlugin": (TorchFSDPPlugin, knobs.FSDP, {}),
    "LowLevelZeroPlugin": (LowLevelZeroPlugin, knobs.ZERO, BF16),
    "GeminiPlugin": (GeminiPlugin, knobs.GEMINI, BF16),
    "HybridParallelPlugin": (HybridParallelPlugin, knobs.HYBRID, HALVES),
    "MoeHybridParallelPlugin": (MoeHybridParallelPlugin, knobs.MOE, {**HALVES, "ep_size": 1}),
}
SCALE = words(
    "initial_scale min_scale growth_factor backoff_factor growth_interval hysteresis max_scale"
)
FUSED = words(
    "enable_all_optimization enable_fused_normalization enable_flash_attention enable_jit_fused "
    "enable_sequence_parallelism"
)
REDUCER = words(
    "broadcast_buffers find_unused_parameters check_reduction gradient_as_bucket_view static_graph"
)
HYBRID = words(
    "tp_size pp_size sp_size precision zero_stage sequence_parallelism_mode parallel_output "
    "num_microbatches microbatch_size max_norm ddp_bucket_cap_mb zero_bucket_size_in_m cpu_offload "
    "communication_dtype overlap_communication custom_policy pp_style num_model_chunks "
    "scheduler_nodes num_layers_per_stage gradient_checkpoint_config enable_metadata_cache "
    "make_vocab_size_divisible_by overlap_p2p overlap_allgather fp8_communication use_fp8"
)
# What the API's users may have written, plugin by plugin.
KNOBS: dict[str, list[str]] = {
    "TorchDDPPlugin": [*REDUCER, "bucket_cap_mb", "fp8_communication"],
    "TorchFSDPPlugin": words(
        "process_group sharding_strategy cpu_offload auto_wrap_policy backward_prefetch "
        "mixed_precision ignored_modules param_init_fn sync_module_states fp8_communication"
    ),
    "LowLevelZeroPlugin": [
        *SCALE,
        *words("stage precision max_norm norm_type reduce_bucket_size_in_m communication_dtype"),
        *words("overlap_communication overlap_allgather cpu_offload master_weights verbose"),
        *words("cast_inputs fp8_communication use_fp8 extra_dp_size"),
    ],
    "GeminiPlugin": [
        *SCALE,
        *FUSED,
        *words("chunk_config_dict chunk_init_device placement_policy enable_gradient_accumulation"),
        *words("max_prefetch shard_param_frac offload_optim_frac offload_param_frac"),
        *words("warmup_non_model_data_ratio steady_cuda_cap_ratio precision master_weights"),
        *words("pin_memory force_outputs_fp32 strict_ddp_mode search_range_m hidden_dim"),
        *words("min_chunk_size_m memstats gpu_margin_mem_ratio max_norm norm_type tp_size"),
        *words("extra_dp_size enable_async_reduce use_fp8 fp8_communication verbose"),
    ],
    "HybridParallelPlugin": [*SCALE, *FUSED, *REDUCER, *HYBRID, "dp_outside", "inner_ring_size"],
    "MoeHybridParallelPlugin": [*SCALE, *FUSED, *REDUCER, *HYBRID, "ep_size", "moe_dp_outside"],
}


@pytest.mark.parametrize(
    ("plugin", "composition"),
    [
        (TorchDDPPlugin(), dp()),
        (TorchFSDPPlugin(), zero(3)),
        (TorchFSDPPlugin(sharding_strategy=ShardingStrategy.SHARD_GRAD_OP), zero(2)),
        (TorchFSDPPlugin(sharding_strategy="NO_SHARD"), dp()),
        (
            TorchFSDPPlugin(mixed_precision=MixedPrecision(param_dtype=torch.bfloat16)),
            compose(zero(3), mixed_precision("bf16", reduce="bf16")),
        ),
        (
            TorchFSDPPlugin(
                mixed_precision=MixedPrecision(
                    param_dtype=torch.bfloat16, reduce_dtype=torch.float32
                )
            ),
            compose(zero(3), mixed_precision("bf16", reduce="fp32")),
        ),
        (LowLevelZeroPlugin(**BF16), compose(zero(1), bf16)),
        (LowLevelZeroPlugin(), compose(zero(1), fp16)),
        (
            LowLevelZeroPlugin(2, initial_scale=2**10, growth_interval=500, max_norm=1.0),
            compose(zero(2), clip(1.0), mixed_precision("fp16", scale=1024, growth_interval=500)),
        ),
        (GeminiPlugin(), compose(zero(3), fp16)),
        (HybridParallelPlugin(2, 1, zero_stage=1), compose(tp(2), zero(1), fp16)),
        (
            LowLevelZeroPlugin(2, "fp32", max_norm=1.0, extra_dp_size=2),
            compose(zero(2), dp(2), fp32, clip(1.0)),
        ),
        (
            LowLevelZeroPlugin(2, "bf16", communication_dtype=torch.bfloat16),
            compose(zero(2), mixed_precision("bf16", reduce="bf16")),
        ),
        (GeminiPlugin(**BF16), compose(zero(3), bf16)),
        (GeminiPlugin(**BF16, shard_param_frac=0.0), compose(zero(2), bf16)),
        (
            GeminiPlugin(**BF16, tp_size=2, extra_dp_size=4, max_norm=0.5),
            compose(zero(3), bf16, tp(2), dp(4), clip(0.5)),
        ),
        (HybridParallelPlugin(**HALVES), compose(tp(2), dp(), bf16)),
        (
            HybridParallelPlugin(**HALVES, zero_stage=2, custom_policy=RULES, max_norm=1),
            compose(tp(2, rules=RULES), zero(2), bf16, clip(1)),
        ),
        (MoeHybridParallelPlugin(**HALVES, ep_size=1), compose(tp(2), dp(), bf16)),
    ],
    ids=repr,
)
def test_a_plugin_is_a_composition(plugin: Transform, composition: Transform) -> None:
    assert plugin == composition
    assert composition == plugin
    assert hash(plugin) == hash(composition)
    assert eval(repr(plugin), vars(parallax)) == plugin
    assert pickle.loads(pickle.dumps(plugin)) == plugin
    assert compose(plugin, composition) == composition
    assert plugin.prepare_dataloader  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", NAMED)
def test_every_knob_of_the_api_is_known(name: str) -> None:
    make, table, _ = NAMED[name]
    mapped = set(inspect.signature(make).parameters) - {"knobs"}
    assert mapped.isdisjoint(table)
    assert mapped | set(table) == set(KNOBS[name])
    assert len(KNOBS[name]) == len(set(KNOBS[name]))


@pytest.mark.parametrize("name", NAMED)
def test_defaults_said_aloud_change_nothing(name: str) -> None:
    make, table, required = NAMED[name]
    defaults = {knob: row.default for knob, row in table.items()}
    assert make(**{**defaults, **required}) == make(**required)
    for knob, row in table.items():
        for value in row.also:
            assert make(**required, **{knob: value}) == make(**required)


@pytest.mark.parametrize(
    ("name", "knob"), [(name, knob) for name, (_, table, _) in NAMED.items() for knob in table]
)
def test_no_other_value_is_taken(name: str, knob: str) -> None:
    make, table, required = NAMED[name]
    row = table[knob]
    taken = {row.default, *row.also}
    other: Any = 12345.5
    if isinstance(row.default, bool):
        other = next((value for value in (True, False) if value not in taken), "surely")
    with pytest.raises(ParallaxError) as caught:
        make(**required, **{knob: other})
    assert str(caught.value) == (
        f"{name} was given {knob}={other!r}, and {row.why}.\n\n{row.fix or f'Leave {knob} out.'}"
    )


LATER = "not there yet"
MESSAGES: list[tuple[Any, str]] = [
    (
        lambda: LowLevelZeroPlugin(precision="int8"),
        (
            "LowLevelZeroPlugin was given precision='int8'.\n\nSay precision='bf16', 'fp16' or "
            "'fp32'."
        ),
    ),
    (
        lambda: LowLevelZeroPlugin(3, "bf16"),
        (
            "LowLevelZeroPlugin was given stage=3, and it knows 1 and 2.\n\nFor sharded parameters "
            "use GeminiPlugin(precision='bf16') or Booster(plugin=zero(3))."
        ),
    ),
    (
        lambda: LowLevelZeroPlugin(**BF16, communication_dtype=torch.float16),
        (
            "LowLevelZeroPlugin was given communication_dtype=torch.float16, and gradients are "
            "summed in float32 or bfloat16.\n\nUse torch.float32 (what None means) or "
            "torch.bfloat16."
        ),
    ),
    (
        lambda: LowLevelZeroPlugin(**BF16, initial_scale=2**10),
        (
            "LowLevelZeroPlugin was given initial_scale=1024, and scaling the loss belongs to "
            "fp16.\n\nLeave it out: precision='bf16' needs no loss scale."
        ),
    ),
    (
        lambda: LowLevelZeroPlugin(initial_scale=1000),
        (
            "LowLevelZeroPlugin: mixed_precision was given scale=1000. Give a power of two, so "
            "that "
            "scaling rounds nothing: 1024, 0.5, ..."
        ),
    ),
    (
        lambda: LowLevelZeroPlugin(cpu_offload=True, stage=5),
        (
            "2 faults:\n\n1. LowLevelZeroPlugin was given cpu_offload=True, and offloading to the "
            "CPU is not there yet.\n\nLeave cpu_offload out.\n\n"
            "2. LowLevelZeroPlugin was given stage=5, and it knows 1 and 2.\n\nFor sharded "
            "parameters use GeminiPlugin(precision='bf16') or Booster(plugin=zero(3))."
        ),
    ),
    (
        lambda: GeminiPlugin(**BF16, shard_param_frac=0.5),
        (
            "GeminiPlugin was given shard_param_frac=0.5, and sharding a fraction of the "
            "parameters is not there yet.\n\nUse 1.0 (all) or 0.0 (none)."
        ),
    ),
    (
        lambda: HybridParallelPlugin(**{**HALVES, "zero_stage": 3}),
        (
            "HybridParallelPlugin was given zero_stage=3, and it knows 0, 1 and 2.\n\nFor sharded "
            "parameters use GeminiPlugin(tp_size=..., precision='bf16')."
        ),
    ),
    (
        lambda: HybridParallelPlugin(**HALVES, microbatch_size=4),
        (
            "HybridParallelPlugin was given microbatch_size=4, and pipelines are not there yet.\n\n"
            "Leave microbatch_size out."
        ),
    ),
    (
        lambda: HybridParallelPlugin(**HALVES, custom_policy=7),  # type: ignore[arg-type]
        (
            "HybridParallelPlugin was given custom_policy=7, and modules are cut by rules.\n\nGive "
            "a mapping of name patterns to styles, for instance {'blocks.*.up': 'colwise', "
            "'blocks.*.down': 'rowwise'}; see parallax.tp."
        ),
    ),
    (
        lambda: MoeHybridParallelPlugin(**HALVES, ep_size=2),
        (
            "MoeHybridParallelPlugin was given ep_size=2, and expert parallelism is not there "
            "yet.\n\nUse ep_size=1 until then."
        ),
    ),
    (
        lambda: TorchFSDPPlugin(sharding_strategy=ShardingStrategy.HYBRID_SHARD),
        (
            "TorchFSDPPlugin was given sharding_strategy='HYBRID_SHARD', and it knows FULL_SHARD, "
            "SHARD_GRAD_OP and NO_SHARD.\n\nFor copies of each shard (HYBRID_SHARD) say how many: "
            "Booster(plugin=presets.hybrid(stage=3, replicas=2))."
        ),
    ),
    (
        lambda: TorchFSDPPlugin(
            mixed_precision=MixedPrecision(
                param_dtype=torch.float16,
                buffer_dtype=torch.bfloat16,
                keep_low_precision_grads=True,
            )
        ),
        (
            "3 faults:\n\n1. TorchFSDPPlugin was given a mixed_precision with "
            "param_dtype=torch.float16, and it takes float32 and bfloat16.\n\nUse torch.bfloat16; "
            "for float16, which needs a loss scale, Booster(mixed_precision='fp16', "
            "plugin=TorchFSDPPlugin()).\n\n"
            "2. TorchFSDPPlugin was given a mixed_precision with buffer_dtype=torch.bfloat16, and "
            "buffers keep their dtype.\n\nLeave buffer_dtype out, or convert the buffers in the "
            "model.\n\n3. TorchFSDPPlugin was given a mixed_precision with "
            "keep_low_precision_grads=True, and inputs are always cast and gradients always kept "
            "in their parameter's dtype.\n\nLeave keep_low_precision_grads out."
        ),
    ),
    (
        lambda: Booster(mixed_precision="fp8", plugin=TorchDDPPlugin()),
        (
            "Booster was given mixed_precision='fp8', and it knows bf16, fp16 and fp32.\n\nFor "
            "float8 products compose the transform: Booster(mixed_precision='bf16', "
            "plugin=compose(..., fp8()))."
        ),
    ),
    (
        lambda: Booster(mixed_precision="fp32", plugin=LowLevelZeroPlugin(**BF16)),
        (
            "Booster was given mixed_precision='fp32' and a plugin that computes in bf16: "
            "compose(bf16, zero(1)).\n\nSay the precision once."
        ),
    ),
]


@pytest.mark.parametrize(("make", "message"), MESSAGES)
def test_what_is_refused_says_why(make: Any, message: str) -> None:
    with pytest.raises(ParallaxError) as caught:
        make()
    assert str(caught.value) == message
    assert isinstance(caught.value, ConflictError) == ("that computes in" in message)


def test_a_mistyped_knob_is_named() -> None:
    with pytest.raises(TypeError) as caught:
        LowLevelZeroPlugin(precision="bf16", cpu_ofload=True)
    assert str(caught.value) == (
        "LowLevelZeroPlugin has no knob 'cpu_ofload'. Did you mean cpu_offload?"
    )


def test_a_plugin_that_was_not_called_is_named() -> None:
    with pytest.raises(TypeError) as caught:
        Booster(plugin=TorchDDPPlugin)  # type: ignore[arg-type]
    assert str(caught.value) == (
        f"Booster was given plugin={TorchDDPPlugin!r}, which is no composition. Write "
        "plugin=TorchDDPPlugin(...), or any transform such as zero(2)."
    )


def test_presets() -> None:
    assert presets.ddp() == dp()
    assert presets.ddp(compute="bf16", max_norm=1.0) == compose(dp(), bf16, clip(1.0))
    assert presets.fsdp() == compose(zero(3), bf16)
    assert presets.hybrid(stage=0, replicas=4) == dp()
    with pytest.raises(ValueError, match="reduce") as caught:
        presets.hybrid(stage=1, reduce="bf16")
    assert str(caught.value) == (
        "hybrid was given reduce='bf16' without compute. Say both: compute='fp32' keeps full "
        "precision and reduces in another dtype."
    )


def section(text: str, title: str) -> str:
    body = text.split(f"## {title}\n", 1)[1]
    return body.split("\n## ", 1)[0]


@pytest.mark.parametrize("name", NAMED)
def test_the_guide_answers_for_every_knob(name: str) -> None:
    text = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text()
    found = section(text, f"`{name}`")
    if "The same knobs as `HybridParallelPlugin`" in found:
        found += section(text, "`HybridParallelPlugin`")
    assert [knob for knob in KNOBS[name] if f"`{knob}`" not in found] == []


def test_the_guide_answers_for_every_method_and_argument() -> None:
    text = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text()
    public = [
        name
        for name, member in inspect.getmembers(Booster, inspect.isfunction)
        if not name.startswith("_")
    ]
    assert [name for name in public if f"`{name}" not in text and f".{name}(" not in text] == []
    arguments = {
        argument
        for name in ("save_model", "load_model", "save_optimizer", "load_optimizer")
        for argument in inspect.signature(getattr(Booster, name)).parameters
    } - {"self", "model", "optimizer", "checkpoint"}
    assert [name for name in arguments if f"`{name}" not in text] == []
