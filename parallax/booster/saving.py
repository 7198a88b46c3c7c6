"""What may be asked of a checkpoint, and where it may be written."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from parallax.checkpoint.files import INDEX, read_index
from parallax.core.state import Kind
from parallax.errors import CheckpointError, raise_all


def check_saving(
    verb: str,
    *,
    shard: bool,
    prefix: str | None,
    size_per_shard: int,
    use_safetensors: bool = True,
    use_async: bool,
) -> None:
    """Refuse what saving does not do, all at once.

    Raises:
        CheckpointError: An argument asks for it.

    Example:
        >>> common = {"shard": True, "prefix": None, "size_per_shard": 1024, "use_async": False}
        >>> check_saving("save_model", **common)
    """

    def faults() -> Iterator[CheckpointError]:
        def fault(name: str, value: object, why: str, fix: str) -> CheckpointError:
            return CheckpointError(f"{verb} was given {name}={value!r}, and {why}.\n\n{fix}")

        if not shard:
            wishes = {"prefix": (prefix, None), "use_async": (use_async, False)}
            for name, (value, default) in wishes.items():
                if value != default:
                    why = "one file is named by the path and written at once"
                    yield fault(name, value, why, f"Use shard=True, or leave {name} out.")
        if not isinstance(size_per_shard, int) or size_per_shard < 1:
            why = "it is the most in one file, in MiB"
            yield fault("size_per_shard", size_per_shard, why, "Give a whole number from 1 on.")
        if prefix is not None and not re.fullmatch(r"[\w-]+", prefix):
            why = "it is put into the names of files"
            yield fault("prefix", prefix, why, "Give letters, digits, - and _ only.")
        if not use_safetensors:
            why = "the only format is safetensors: pickled files run code when they are read"
            yield fault("use_safetensors", use_safetensors, why, "Leave use_safetensors out.")

    raise_all(faults())


def directory_fault(path: Path, kinds: tuple[Kind, ...]) -> None:
    """Raise when saving a directory would delete something other than an older save of the same.

    Args:
        path: Where `parallax.checkpoint.save` will write; it replaces what is there.
        kinds: What will be written.

    Raises:
        CheckpointError: Something else is there.
    """
    if not path.exists():
        return
    if not path.is_dir():
        raise CheckpointError(
            f"shard=True writes a directory, and {path} is a file.\n\nGive another path."
        )
    inside = sorted(p.name for p in path.iterdir())
    if not inside:
        return
    if INDEX not in inside:
        shown = ", ".join(inside[:6])
        raise CheckpointError(
            f"saving to {path} replaces the directory, and it holds other files: {shown}.\n\n"
            "Give a directory of its own, for instance one below."
        )
    held = {key.split("/")[0] for key in read_index(path).tensors} - set(kinds)
    if held:
        raise CheckpointError(
            f"saving to {path} replaces the directory, and it holds {' and '.join(sorted(held))} "
            "of another checkpoint.\n\nGive model and optimizer a directory each."
        )


def check_loading(verb: str, low_cpu_mem_mode: bool, num_threads: int) -> None:
    """Refuse what loading does not do.

    Raises:
        CheckpointError: An argument asks for it.
    """
    reason = "each rank reads only the blocks it holds, from memory-mapped files"
    wishes = {"low_cpu_mem_mode": (low_cpu_mem_mode, True), "num_threads": (num_threads, 1)}
    raise_all(
        CheckpointError(f"{verb} was given {name}={value!r}, and {reason}.\n\nLeave {name} out.")
        for name, (value, default) in wishes.items()
        if value != default
    )
