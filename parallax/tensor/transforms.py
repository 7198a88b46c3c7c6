"""Transforms that cut modules over the tensor axis."""

from __future__ import annotations

from collections.abc import Mapping

from parallax.core.axes import Axes
from parallax.core.late import Late
from parallax.core.phase import Phase
from parallax.core.rewrite import Rewrite
from parallax.core.spell import degree_fault, spell
from parallax.core.transform import Transform, state
from parallax.tensor.facts import Cutting

TENSOR = Rewrite(
    "tensor",
    Phase.TENSOR,
    Late("parallax.tensor.lower:build"),
    Late("parallax.tensor.lower:check"),
)
"""Cuts modules over the tp axis."""


def tp(
    degree: int,
    *,
    rules: Mapping[str, str] | tuple[tuple[str, str], ...] | None = None,
    loss_parallel: bool | None = None,
) -> Transform:
    """Cut linear layers and embeddings over ranks that share one batch (arXiv:1909.08053).

    Attention must reshape its heads with `-1` (`x.unflatten(-1, (-1, head_dim))`), since each rank
    holds `heads / degree` of them.

    States:
        Axes.tp, Cutting.rules, Cutting.loss_parallel.

    Cost:
        Parameters, gradients, optimizer state and activations of the cut modules: 1 / degree.
        Traffic a column/row pair and rank: 2 x (degree - 1) / degree x bytes of its output, once
        forward and once backward.

    Args:
        degree: Number of ranks to cut over.
        rules: Style by name pattern (`*` stands for one segment, `**` for any). Styles, in the
        words
            of transformers' plans: `colwise`, `rowwise`, `colwise_gather_output`,
            `rowwise_split_input`, `embedding_rowwise`, `embedding_colwise`, `sequence_parallel`,
            `rowwise_scatter_sequence`, `embedding_rowwise_scatter_sequence`,
            `replicated_with_grad_allreduce`, `replicate`. None takes the model's own `tp_plan`.
        loss_parallel: Keep the outputs of `colwise_gather_output` heads cut, as DTensors, and
            compute `cross_entropy` on them without gathering.

    Raises:
        ValueError: The degree is not a positive number. Faults of rules are raised at the call, as
            `RuleError`, since they depend on the model.

    Example:
        >>> tp(2, rules={"blocks.*.up": "colwise", "blocks.*.down": "rowwise"})
        tp(2, rules=(('blocks.*.down', 'rowwise'), ('blocks.*.up', 'colwise')))
    """
    if degree is None:
        raise ValueError("tp needs a number of ranks: tp(2).")
    degree_fault("tp", degree)
    pairs = tuple(rules.items()) if isinstance(rules, Mapping) else rules
    pairs = (
        None if pairs is None else tuple(sorted(pairs))
    )  # rules are disjoint: order says nothing
    by = spell("tp", degree, rules=pairs, loss_parallel=loss_parallel)
    fact = Cutting(rules=pairs, loss_parallel=loss_parallel)
    return state(by, Axes(tp=degree), fact, rewrites=(TENSOR,))


tensor_parallel = tp
