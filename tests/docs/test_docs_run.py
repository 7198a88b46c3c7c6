"""What README and docs say is true: their code runs, their links lead somewhere, nothing public is
left out.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import doctest
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

import parallax
from parallax.testing import World, laws
from parallax.testing.plugin import assert_trains_like_one_process

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES += sorted((ROOT / "docs" / "transforms").glob("*.md"))
LINKED = [*PAGES, *sorted((ROOT / "docs" / "decisions").glob("*.md"))]
LINKED += sorted((ROOT / "notebooks").glob("*.md"))


@dataclass(frozen=True)
class Block:
    """One code block of a page.

    Attributes:
        where: File and line, for tracebacks.
        code: Its text.
    """

    where: str
    code: str

    @property
    def is_session(self) -> bool:
        return self.code.lstrip().startswith(">>>")

    @property
    def verifies(self) -> bool:
        """Whether it starts ranks of its own, and so cannot run on one."""
        return re.search(r"verify\(|trains_like_one_process|world\(", self.code) is not None


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(f"{page.name}:{text.count(chr(10), 0, found.start(1)) + 1}", found[1])
        for found in re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    ]


class Net(nn.Module):
    """The model that the pages speak of."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(8, 16), "down": nn.Linear(16, 8)}) for _ in range(2)
        )
        self.head = nn.Linear(8, 4)

    @property
    def tp_plan(self) -> dict[str, str]:
        return {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        for block in self.blocks:
            x = x + block["down"](torch.relu(block["up"](x)))
        return self.head(x)


def loss_fn(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch["x"]), batch["y"])


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def stand_ins(directory: str) -> dict[str, Any]:
    """What the pages take for granted: a model, data, and what is imported from elsewhere."""
    torch.manual_seed(0)
    x = torch.randn(128, 8)
    dataset = [{"x": row, "y": (row.sum() > 0).long()} for row in x]
    batch = {"x": x[:8], "y": (x[:8].sum(1) > 0).long()}
    model = Net()
    optimizer = sgd(model)
    return {
        "__name__": "page",
        "parallax": parallax,
        "torch": torch,
        "Net": Net,
        "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
        "Block": nn.ModuleDict,
        "model": model,
        "optimizer": optimizer,
        "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 10),
        "criterion": lambda outputs: outputs.square().mean(),
        "dataset": dataset,
        "train_dataloader": DataLoader(dataset, batch_size=64),
        "loader": [batch, batch],
        "batch": batch,
        "batches": [batch],
        "loss_fn": loss_fn,
        "make_model": Net,
        "make_optimizer": sgd,
        "model_fn": Net,
        "optimizer_fn": sgd,
        "transform": parallax.zero(2),
        "mine": lambda: parallax.clip(1.0),
        "directory": directory,
        **{name: getattr(parallax, name) for name in ("bf16", "clip", "compose", "tp", "zero")},
    }


def run_here(page: list[Block], directory: str) -> dict[str, Any]:
    """Run the blocks of a page one after the other in one namespace, as a reader would."""
    with contextlib.chdir(Path(directory).parent):  # pages write to folders of relative names
        return _run(page, stand_ins(directory))


def _run(page: list[Block], namespace: dict[str, Any]) -> dict[str, Any]:
    for block in page:
        if block.is_session:
            examples = doctest.DocTestParser().get_doctest(
                block.code, namespace, block.where, None, 0
            )
            said: list[str] = []
            doctest.DocTestRunner(verbose=False).run(examples, out=said.append, clear_globs=False)
            assert not said, "".join(said)
            namespace = examples.globs
        else:
            exec(compile(block.code, block.where, "exec", dont_inherit=True), namespace)
    return namespace


def train_with(page: list[Block], directory: str, wanted: str) -> float:
    """Train one step with a transform that a page defines."""
    namespace = run_here(page, directory)
    model = Net()
    boosted = parallax.compose(namespace[wanted](0.5), parallax.zero(2))(model, sgd(model))
    return float(boosted.train_step(loss_fn, boosted.shard(stand_ins(directory)["batches"][0])))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_code_compiles_and_knows_its_names(page: Path) -> None:
    known = set(stand_ins("")) | set(vars(builtins))
    for block in blocks(page):
        code = re.sub(r"^(?!>>> |\.\.\. ).*$", "", block.code, flags=re.MULTILINE)
        code = re.sub(r"^(>>> |\.\.\. )", "", code, flags=re.MULTILINE)
        tree = ast.parse(code if block.is_session else block.code, block.where)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("parallax"):
                module = __import__(node.module or "", fromlist=["*"])
                missing = [a.name for a in node.names if not hasattr(module, a.name)]
                assert not missing, f"{block.where} imports {missing} from {node.module}"
            if isinstance(node, ast.Import | ast.ImportFrom):
                known |= {(a.asname or a.name).partition(".")[0] for a in node.names}
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                known.add(node.name)
            if isinstance(node, ast.arg):
                known.add(node.arg)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                known.add(node.id)
        used = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
        assert used <= known, f"{block.where} uses {sorted(used - known)}, which nothing defines"


@pytest.mark.ranks
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_code_runs_on_ranks(page: Path, world2: World, tmp_path: Path) -> None:
    found = [block for block in blocks(page) if not block.verifies]
    if not found:
        return
    # Some pages print, and all leave objects behind that mean nothing here.
    world2.run(lambda: bool(run_here(found, str(tmp_path / "checkpoint"))))


@pytest.mark.ranks
def test_the_transform_that_the_docs_write_trains(world2: World, tmp_path: Path) -> None:
    found = [b for b in blocks(ROOT / "docs" / "index.md") if "Rewrite(" in b.code]
    assert len(found) == 1
    losses = world2.run(train_with, found, str(tmp_path), "scaled")
    assert losses[0] == losses[1]


@pytest.mark.ranks
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_code_that_verifies_runs(page: Path, tmp_path: Path) -> None:
    found = [block for block in blocks(page) if block.verifies]
    namespace = run_here(found, str(tmp_path))
    for name, value in namespace.items():
        if name.startswith("test_"):
            value(assert_trains_like_one_process)
    if "report" in namespace:
        assert namespace["report"].ok, namespace["report"]


def links(page: Path) -> list[str]:
    """Relative links of a page; code and what is elsewhere are not links."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"`[^`\n]*`", "", text)
    found = re.findall(r"\]\(([^)\s]+)\)", text)
    return [link for link in found if not re.match(r"[a-z]+:|#", link)]


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    missing = [link for link in links(page) if not (page.parent / link.partition("#")[0]).exists()]
    assert not missing


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    pages = [p.relative_to(ROOT / "docs").as_posix() for p in (ROOT / "docs").rglob("*.md")]
    assert [page for page in pages if page not in navigation] == []


@pytest.mark.parametrize("name", parallax.__all__)
def test_every_public_name_is_documented(name: str) -> None:
    spans = [
        span
        for page in PAGES
        for span in re.findall(r"```.*?```|`[^`\n]+`", page.read_text(), re.DOTALL)
    ]
    assert any(re.search(rf"(?<![\w.]){name}\b", span) for span in spans)


def first_cells(page: Path) -> str:
    rows = [line for line in page.read_text().splitlines() if line.startswith("|")]
    return "\n".join(row.split("|")[1] for row in rows)


@pytest.mark.parametrize("page", ["transforms.md", "law-suite.md"])
@pytest.mark.parametrize("name", sorted(laws.exported()))
def test_every_transform_has_a_row(page: str, name: str) -> None:
    cells = first_cells(ROOT / "docs" / page)
    name = laws.ALIASES.get(name, name)
    assert re.search(rf"`{name}[`(]", cells), f"docs/{page} has no row for {name}"


def test_what_is_missing_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("[a](nowhere.md) `[b](code.md)`\n\n```python\nparallax.nothing()\n```\n")
    assert links(page) == ["nowhere.md"]
    with pytest.raises(AttributeError, match="nothing"):
        run_here(blocks(page), "")
    page.write_text("```python\n>>> 1 + 1\n3\n```\n")
    with pytest.raises(AssertionError, match="Expected"):
        run_here(blocks(page), "")
    page.write_text("```python\nfrom parallax import nothing\n```\n")
    with pytest.raises(AssertionError, match="imports \\['nothing'\\] from parallax"):
        test_code_compiles_and_knows_its_names(page)
