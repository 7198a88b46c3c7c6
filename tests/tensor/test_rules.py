"""Rules: which module is cut how, and what is refused; no process."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from parallax.core.names import Names
from parallax.core.patterns import matches, nearest
from parallax.tensor.rules import resolve, size_faults
from parallax.testing import toys

segments = st.lists(
    st.sampled_from(["blocks", "attn", "0", "17", "q_proj"]), min_size=1, max_size=4
)


@given(segments)
def test_patterns(parts: list[str]) -> None:
    name = ".".join(parts)
    assert matches(name, name)
    assert matches(".".join("*" * len(parts)), name)
    assert matches("**", name)
    assert matches("*", name) == (len(parts) == 1)
    assert matches(f"**.{parts[-1]}", name) == (len(parts) > 1)
    assert not matches(name, f"{name}.x")
    assert not matches(name.replace(".", "_") + "_", name)


def test_dots_and_brackets_are_no_patterns() -> None:
    assert not matches("a.b", "axb")
    assert not matches("a[0]", "a0")
    assert matches("blocks.*.q", "blocks.3.q")
    assert not matches("blocks.*.q", "blocks.3.attn.q")


def test_nearest_names_count_numbers_once() -> None:
    names = [f"blocks.{i}.{leaf}" for i in range(9) for leaf in ("up", "down")]
    assert nearest("block.*.up", names)[0] == "blocks.*.up"
    assert nearest("zzz", names) == ["blocks.*.up", "blocks.*.down"]


def found(model: nn.Module, rules: dict[str, str] | None) -> dict[str, str]:
    styles, faults = resolve(
        model, tuple(rules.items()) if rules is not None else None, Names.of(model)
    )
    assert not faults, faults
    return styles


def faults_of(model: nn.Module, rules: dict[str, str]) -> list[str]:
    return [str(f) for f in resolve(model, tuple(rules.items()), Names.of(model))[1]]


def test_a_models_own_plan_is_taken() -> None:
    styles = found(toys.Gpt(), None)
    assert styles["blocks.1.attn.out"] == "rowwise"
    assert len(styles) == 2 + 2 * 6


def test_a_tied_embedding_is_cut_with_its_head() -> None:
    model = toys.Gpt(tied=True)
    for head, embedding in (
        ("colwise_gather_output", "embedding_rowwise"),
        ("rowwise", "embedding_colwise"),
    ):
        assert found(model, {"head": head}) == {"head": head, "embed": embedding}
    assert found(toys.Gpt(), {"head": "colwise_gather_output"}) == {"head": "colwise_gather_output"}


def test_earlier_names_of_styles_are_understood() -> None:
    assert found(toys.Mlp(), {"layers.0": "colwise_rep", "layers.1": "rowwise_rep"}) == {
        "layers.0": "colwise_gather_output",
        "layers.1": "rowwise_split_input",
    }


def test_rules_that_agree_may_overlap() -> None:
    rules = {"layers.*": "colwise_rep", "layers.0": "colwise_gather_output"}
    assert found(toys.Mlp(), rules)["layers.0"] == "colwise_gather_output"


def test_rules_that_disagree_are_named() -> None:
    assert faults_of(toys.Mlp(), {"layers.*": "rowwise", "layers.0": "colwise"}) == [
        (
            "two rules match layers.0: 'rowwise' and 'colwise' (by 'layers.0').\n\n"
            "Make the patterns disjoint."
        )
    ]


def test_a_style_of_another_kind_of_module_is_named() -> None:
    rules = {"embed": "rowwise_split_input", "head": "embedding_rowwise", "norm": "colwise"}
    assert faults_of(toys.Gpt(), rules) == [
        (
            "the style 'rowwise_split_input' was asked for embed, which is a Embedding.\n\n"
            "It cuts modules of the kind Linear."
        ),
        (
            "the style 'embedding_rowwise' was asked for head, which is a Linear.\n\n"
            "It cuts modules of the kind Embedding."
        ),
        (
            "the style 'colwise' was asked for norm, which is a LayerNorm.\n\n"
            "It cuts modules of the kind Linear or Embedding."
        ),
    ]


def test_all_faults_of_rules_are_collected() -> None:
    rules = {"layers.9": "colwise", "layers.0": "diagonal", "layers.1": "embedding_rowwise"}
    assert len(faults_of(toys.Mlp(), rules)) == 3


def sizes(model: nn.Module, degree: int) -> list[str]:
    return [str(f) for f in size_faults(model, found(model, None), degree, f"tp({degree})")]


def test_sizes_that_fit_are_taken() -> None:
    for degree in (1, 2, 4):
        assert sizes(toys.Gpt(), degree) == []


def test_degrees_that_fit_are_those_that_are_said_to() -> None:
    model = toys.Gpt(heads=2)
    (text,) = sizes(model, 4)
    fits = [int(n) for n in text.rpartition(": ")[2].rstrip(".").split(", ")]
    assert fits == [1, 2]
    assert all(sizes(model, degree) == [] for degree in fits)
    assert all(sizes(model, degree) for degree in range(1, 9) if degree not in fits)
