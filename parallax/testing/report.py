"""The outcome of a verification, as a value, a table and JSON."""

from __future__ import annotations

import dataclasses
import io
import json
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Row:
    """One quantity.

    Attributes:
        quantity: What was compared.
        worst: Where the error was largest against its bound: a parameter's full name, a step,
        ranks.
        error: Largest absolute difference there.
        bound: What rounding can explain there.
    """

    quantity: str
    worst: str
    error: float
    bound: float

    @property
    def ok(self) -> bool:
        """Whether the error is within its bound."""
        return self.error <= self.bound  # false for NaN


@dataclass
class Report:
    """Whether a composition trains like one process.

    Attributes:
        composition: The composition in the user's spelling.
        world: Number of ranks it ran on.
        steps: Number of steps.
        dtype: In which precision it was checked.
        rows: What was compared.
        blame: When it failed: the smallest set of transforms that fails.
        where: When it failed: the first module whose output or gradient differs.
        error: When it did not run through: the error's text.
        seconds: How long it took.
    """

    composition: str
    world: int
    steps: int
    dtype: str
    rows: list[Row] = field(default_factory=list)
    blame: list[str] = field(default_factory=list)
    where: str = ""
    error: str = ""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether every row is within its bound."""
        return not self.error and bool(self.rows) and all(row.ok for row in self.rows)

    @property
    def message(self) -> str:
        """What failed, which transforms broke it and where; empty when nothing did."""
        if self.ok:
            return ""
        failed = [row for row in self.rows if not row.ok]
        lines = [f"{self.composition} on {self.world} ranks does not train like one process."]
        if self.error:
            lines.append(f"It raised: {self.error}")
        if failed:
            rows = (
                f"{r.quantity} ({r.worst}): off by {r.error:.1e}, bound {r.bound:.1e}"
                for r in failed
            )
            lines.append("; ".join(rows) + ".")
        if self.blame:
            lines.append(f"Broken by {' with '.join(self.blame)}.")
        if self.where:
            lines.append(self.where)
        return "\n".join(lines)

    def to_json(self) -> str:
        """The report as JSON."""
        fields = dataclasses.asdict(self)
        for row, value in zip(fields["rows"], self.rows, strict=True):
            row["ok"] = value.ok
        return json.dumps({**fields, "ok": self.ok}, indent=1)

    def table(self) -> Table:
        """The report as a rich table."""
        verdict = "trains like one process" if self.ok else "DOES NOT train like one process"
        title = (
            f"{self.composition} {verdict}\n{self.world} ranks, {self.steps} steps, {self.dtype}"
        )
        table = Table(title=title, title_justify="left", min_width=72)
        for name in ("quantity", "worst", "error", "bound", ""):
            table.add_column(name, justify="right" if name in ("error", "bound") else "left")
        for row in self.rows:
            verdict = "pass" if row.ok else "FAIL"
            table.add_row(row.quantity, row.worst, f"{row.error:.1e}", f"{row.bound:.1e}", verdict)
        return table

    def __str__(self) -> str:
        out = io.StringIO()
        Console(file=out, width=120, force_terminal=False, force_jupyter=False).print(self.table())
        return out.getvalue() + (f"{self.message}\n" if self.message else "")

    def __rich__(self) -> Table:
        return self.table()
