"""The notebooks run from top to bottom, show what they promise, and are stored as they ran."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))

# What a reader must find in the outputs, in this order.
SHOWN = {
    "01-first-steps": (
        "mesh      data_shard 512 x tp 2",
        "ConflictError: the transforms disagree.",
        "MeshError: 8 ranks are running",
        "largest difference to one process",
        "blocks.0.up.weight    (128, 64) -> (32, 64)",
        "20 + 20 steps, largest difference to one process",
        "image/png",
    ),
    "02-catching-a-fault": (
        "DOES NOT train like one process",
        "Broken by tp(2).",
        "In the first forward, the output of blocks.0.out is the first to differ.",
        "compose(bf16, clip(1.0), tp(2)) trains like one process",
        "It raised: the gradient of blocks.0.query_norm.bias",
        "replicated_with_grad_allreduce",
        "Broken by tp(2).",
        "Broken by zero(2)",
        "Broken by accumulate(2, exact=False)",
        "the gradient of head.bias is the first parameter's to differ",
        "Broken by zero(2).",
        "1 failed, 1 passed",
    ),
}


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def outputs(notebook: Any) -> str:
    """All that the cells showed, as text; of a picture its kind."""
    shown: list[str] = []
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            shown.append(output.get("text", "") or data.get("text/plain", ""))
            shown += [kind for kind in data if kind.startswith("image/")]
    return re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(shown))


def check_shown(text: str, wanted: tuple[str, ...]) -> None:
    at = 0
    for phrase in wanted:
        found = text.find(phrase, at)
        assert found >= 0, f"{phrase!r} is not shown after:\n{text[:at][-400:]}"
        at = found + len(phrase)


def differences(text: str) -> list[float]:
    return [float(x) for x in re.findall(r"difference to one process: ([\d.e+-]+)", text)]


def test_every_notebook_is_tested() -> None:
    assert [path.stem for path in NOTEBOOKS] == sorted(SHOWN)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_stored_notebook_is_as_it_ran(path: Path) -> None:
    notebook = read(path)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    kinds = [(o.output_type, o.get("name")) for cell in code for o in cell.outputs]
    assert ("stream", "stderr") not in kinds, "a stored warning"
    assert all(kind != "error" for kind, _ in kinds)
    check_shown(outputs(notebook), SHOWN[path.stem])
    assert path.stat().st_size < 100_000
    for output in (o for cell in code for o in cell.outputs):
        output.get("data", {}).pop("image/png", None)  # its letters may spell anything
    text = nbformat.writes(notebook)
    foreign = re.findall(r"(?:/(?:home|root|Users|tmp|work|opt)/|site-packages|https?:)\S*", text)
    assert not foreign, "paths or addresses of one machine"


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_what_it_promises(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # this checkout, wherever the kernel starts
    notebook = read(path)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []  # nothing stored may pass for something shown
    NotebookClient(
        notebook,
        timeout=300,
        kernel_name="python3",
        resources={"metadata": {"path": str(path.parent)}},
    ).execute()
    text = outputs(notebook)
    check_shown(text, SHOWN[path.stem])
    if path.stem == "01-first-steps":
        assert len(differences(text)) == 2
        # float32 over 40 steps; a missing reduction would show from the second step on, at 1e-2.
        assert max(differences(text)) < 1e-4


def test_what_is_missing_is_noticed() -> None:
    with pytest.raises(AssertionError, match="'Broken by' is not shown after"):
        check_shown("passes\nBroken by tp(2)", ("tp(2)", "Broken by"))
    assert differences("largest difference to one process: 1e-06\n") == [1e-06]
