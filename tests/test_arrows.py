"""The arrows of the house: who may import whom, and who may touch torch's private parts."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "parallax"

# Lower floors know nothing of higher ones. What is not listed is a room, between core and presets.
FLOORS = {"errors": 0, "surroundings": 1, "launch": 2, "core": 3, "presets": 5, "parse": 6}
FLOORS |= {"booster": 7, "": 8}
ROOM = 4
TOP = {"testing", "cli", "train", "__main__"}
PRIVATE_ALLOWED = {"planner"}


def modules() -> dict[str, Path]:
    """Every module of the package by dotted name below `parallax`; the package itself is ''."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = path
    return found


def imports(tree: ast.AST, known: set[str]) -> Iterator[tuple[int, str]]:
    """Every module that a tree imports, also inside functions and for types only."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                is_module = inner.removeprefix("parallax.") in known or "._" in inner
                yield node.lineno, inner if is_module else node.module or "."


def private_attributes(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every use of a private name through torch or a module of it that has another name here."""
    names = {"torch": "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                origin = getattr(node, "module", None)
                full = f"{origin}.{alias.name}" if origin else alias.name
                if alias.asname or origin:
                    names[alias.asname or alias.name] = full
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            chain = [node.attr]
            below = node.value
            while isinstance(below, ast.Attribute):
                chain.append(below.attr)
                below = below.value
            full = names.get(below.id, "") if isinstance(below, ast.Name) else ""
            parts = [*full.split("."), *reversed(chain)]
            # Classes are no modules: what is private to an instance or a class is ruff's concern.
            if parts[0] == "torch" and all(part.islower() for part in parts[:-1]):
                yield node.lineno, ".".join(parts)


def is_private(module: str) -> bool:
    parts = module.split(".")
    return parts[0] == "torch" and any(p.startswith("_") and p[:2] != "__" for p in parts)


def faults(name: str, source: str, known: set[str]) -> list[str]:
    """What is wrong with the imports of the module `parallax.<name>`."""
    tree = ast.parse(source)
    own = name.split(".", maxsplit=1)[0]
    floor = FLOORS.get(own, ROOM)
    found = []
    for line, module in imports(tree, known):
        if module == "." or (module.split(".")[0] != "parallax") or own in TOP or own == "":
            continue
        inner = module.removeprefix("parallax").removeprefix(".")
        target = inner.split(".")[0]
        if target == own:
            continue
        fits = FLOORS.get(target, ROOM) < floor and target not in TOP
        facts = floor == ROOM and target not in TOP and inner == f"{target}.facts"
        fault = f"parallax.{name}:{line} imports {module}"
        if not (fits or facts or fault in found):
            found.append(fault)
    if name.rpartition(".")[2] != "lower" and own not in PRIVATE_ALLOWED:
        private = {*imports(tree, known), *private_attributes(tree)}
        lines = {(line, ".".join(module.split("."))) for line, module in private}
        found += [
            f"parallax.{name}:{line} uses {module}"
            for line, module in sorted(lines)
            if is_private(module)
        ]
    return found


def test_the_package_keeps_its_arrows() -> None:
    known = modules()
    assert "errors" in known
    found = [
        fault
        for name, path in known.items()
        for fault in faults(name, path.read_text(), set(known))
    ]
    assert not found, "\n".join(found)


KNOWN = {"errors", "launch", "core", "core.fact", "store", "store.facts", "store.lower", "tensor"}


@pytest.mark.parametrize(
    ("name", "source", "fault"),
    [
        ("errors", "import parallax.launch", "parallax.errors:1 imports parallax.launch"),
        ("launch", "from parallax import core", "parallax.launch:1 imports parallax.core"),
        (
            "core.plan",
            "from parallax.store.facts import Sharding",
            "parallax.core.plan:1 imports parallax.store.facts",
        ),
        (
            "tensor.lower",
            "def f():\n    from parallax.store import lower",
            "parallax.tensor.lower:2 imports parallax.store.lower",
        ),
        (
            "tensor.rules",
            "from parallax.store import zero",
            "parallax.tensor.rules:1 imports parallax.store",
        ),
        ("store.lower", "import parallax", "parallax.store.lower:1 imports parallax"),
        ("store.lower", "from parallax import zero", "parallax.store.lower:1 imports parallax"),
        (
            "store.lower",
            "from parallax.presets import zoo",
            "parallax.store.lower:1 imports parallax.presets",
        ),
        (
            "presets",
            "from parallax.booster import Booster",
            "parallax.presets:1 imports parallax.booster",
        ),
        (
            "booster",
            "from parallax.testing import world",
            "parallax.booster:1 imports parallax.testing",
        ),
        (
            "store.zero",
            "import torch.distributed._functional_collectives as c",
            "parallax.store.zero:1 uses torch.distributed._functional_collectives",
        ),
        (
            "testing.world",
            "from torch.distributed.fsdp import _fully_shard",
            "parallax.testing.world:1 uses torch.distributed.fsdp._fully_shard",
        ),
        (
            "core.boost",
            "import torch\nx = torch._foreach_norm",
            "parallax.core.boost:2 uses torch._foreach_norm",
        ),
        (
            "core.boost",
            "import torch.distributed as dist\nx = dist._world",
            "parallax.core.boost:2 uses torch.distributed._world",
        ),
    ],
)
def test_a_planted_fault_is_found(name: str, source: str, fault: str) -> None:
    assert faults(name, source, KNOWN) == [fault]


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("launch", "from parallax.errors import LaunchError"),
        ("core.boost", "from parallax.core.fact import Fact\nfrom parallax import errors"),
        ("store.zero", "from parallax.store.lower import shard\nimport parallax.launch"),
        ("tensor.rules", "from parallax.store.facts import Sharding"),
        ("tensor.rules", "from parallax.store import facts"),
        ("presets", "from parallax.store import zero"),
        ("booster.plugin", "from parallax.presets import zoo"),
        ("", "from parallax.booster import Booster"),
        ("cli.train", "import parallax\nfrom parallax.testing.world import world"),
        ("store.lower", "from torch.distributed.fsdp import _fully_shard"),
        ("planner.cost", "import torch._subclasses"),
        ("store.zero", "import torch\nx = torch.__version__"),
        ("store.zero", "from torch import nn\nx = nn.Module._parameters"),
    ],
)
def test_what_is_allowed_is_not_a_fault(name: str, source: str) -> None:
    assert faults(name, source, KNOWN) == []


def test_files_stay_short() -> None:
    long = {name: lines for name, path in modules().items() if (lines := lines_of(path)) >= 400}
    assert not long


def lines_of(path: Path) -> int:
    return len(path.read_text().splitlines())
