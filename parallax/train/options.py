"""What a job is asked to do."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """Everything a run depends on, so that ranks can be handed it whole.

    Args:
        compose: The composition, as text.
        size: Name of the model size.
        steps: Step to train to.
        batch_size: Samples in a step, over all ranks.
        seq: Bytes predicted in a sample.
        lr: Highest learning rate.
        warmup: Steps until it is reached; then it falls along a cosine to a tenth.
        weight_decay: Of the matrices; gains have none.
        seed: Of weights, sample order and generated text.
        data: File or folder of text; Python's standard library if None.
        data_limit: Bytes of it to read at most.
        out: Folder to write to.
        resume: Whether to continue from the last checkpoint there: `"auto"` if there is one. A job
            that a launcher restarts continues from its own in any case.
        save_every: Steps between checkpoints; 0 saves at the end only.
        keep: How many of the newest checkpoints stay.
        eval_windows: Held-out samples to judge by, at most.
        sample_length: Bytes of text to generate.
        prompt: What they continue.
        temperature: What scores are divided by when drawing them.
    """

    compose: str = "tp(2), zero(2), bf16"
    size: str = "tiny"
    steps: int = 200
    batch_size: int = 16
    seq: int = 128
    lr: float = 2e-3
    warmup: int = 20
    weight_decay: float = 0.1
    seed: int = 0
    data: Path | None = None
    data_limit: int = 16 << 20
    out: Path = Path("runs/tiny")
    resume: Literal["never", "auto", "must"] = "never"
    save_every: int = 0
    keep: int = 3
    eval_windows: int = 256
    sample_length: int = 200
    prompt: str = "def "
    temperature: float = 0.8
