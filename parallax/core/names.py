"""The name law: parameters are known by their original full name.

A rewrite may add names in SURGERY and drop them in SPLIT; it may not change one. The optimizer,
checkpoints and messages all rely on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from parallax.core.phase import Phase
from parallax.errors import RenameError


@dataclass(frozen=True)
class Names:
    """The names of a model's tensors before anything was rewritten.

    Attributes:
        parameters: One name for each parameter, in registration order; of tied parameters the
            first name.
        ties: The further names of tied parameters, each with the first name.
        buffers: Names of buffers that are saved.
        transient: Names of buffers that are not saved.
    """

    parameters: tuple[str, ...]
    ties: tuple[tuple[str, str], ...]
    buffers: tuple[str, ...]
    transient: tuple[str, ...]

    @staticmethod
    def of(model: nn.Module) -> Names:
        """Read the names off a model."""
        first: dict[int, str] = {}
        ties: list[tuple[str, str]] = []
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if id(parameter) in first:
                ties.append((name, first[id(parameter)]))
            else:
                first[id(parameter)] = name
        buffers = [name for name, _ in model.named_buffers()]
        saved = set(_persistent(model))
        return Names(
            parameters=tuple(first.values()),
            ties=tuple(ties),
            buffers=tuple(n for n in buffers if n in saved),
            transient=tuple(n for n in buffers if n not in saved),
        )

    def parameters_of(self, *parts: nn.Module) -> dict[str, nn.Parameter]:
        """This rank's parameters by original name."""
        present: dict[str, nn.Parameter] = {}
        for part in parts:
            present.update(part.named_parameters(remove_duplicate=False))
        return {name: present[name] for name in self.parameters if name in present}

    def buffers_of(self, *parts: nn.Module) -> dict[str, Tensor]:
        """This rank's saved buffers by original name."""
        present = {name: buffer for part in parts for name, buffer in part.named_buffers()}
        return {name: present[name] for name in self.buffers if name in present}

    def follow(self, parts: tuple[nn.Module, ...], phase: Phase, rewrite: str) -> Names:
        """The names after a rewrite, having checked that it kept the law.

        Raises:
            RenameError: A name disappeared, appeared or was untied where the phase does not allow.
        """
        now = {
            name: p for part in parts for name, p in part.named_parameters(remove_duplicate=False)
        }
        known = set(self.parameters) | {name for name, _ in self.ties}
        lost = sorted(known - set(now)) if phase is not Phase.SPLIT else []
        gained = sorted(set(now) - known) if phase is not Phase.SURGERY else []
        if lost or gained:
            what = "; ".join(
                f"{verb} {_some(names)}"
                for verb, names in (("lost", lost), ("new", gained))
                if names
            )
            raise RenameError(
                f"the rewrite {rewrite} must keep every parameter's original full name, and "
                f"changed them: {what}.\n\nKeep the module tree as it is (use module.compile() and "
                "the composable checkpoint, not wrappers); names may be added in SURGERY and "
                "dropped in SPLIT only."
            )
        untied = [(a, b) for a, b in self.ties if a in now and b in now and now[a] is not now[b]]
        if untied:
            alias, first = untied[0]
            raise RenameError(
                f"the rewrite {rewrite} untied {alias} from {first}, which were one parameter.\n\n"
                "Assign the same new parameter under both names."
            )
        return self if set(now) == known else Names.of(_bundle(parts))

    def __iter__(self) -> Iterator[str]:
        return iter(self.parameters)


def _persistent(model: nn.Module) -> Iterator[str]:
    for prefix, module in model.named_modules():
        # torch has no public way to tell which buffers a state dict leaves out.
        transient: set[str] = module._non_persistent_buffers_set  # noqa: SLF001
        for name, buffer in module.named_buffers(recurse=False):
            if buffer is not None and name not in transient:
                yield f"{prefix}.{name}" if prefix else name


def _bundle(parts: tuple[nn.Module, ...]) -> Any:
    if len(parts) == 1:
        return parts[0]
    raise RenameError("names can be read off one module only; a split model keeps its first names.")


def _some(names: list[str], most: int = 4) -> str:
    shown = ", ".join(names[:most])
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")
