import dataclasses
import fnmatch

import pytest
import torch
from torch import nn

from parallax.errors import ParallaxError
from parallax.train.decoder import SIZES, Attention, Decoder, Size, rotate, size

SMALL = Size(dim=32, layers=2, heads=4, kv_heads=2, hidden=48)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Decoder(SMALL)


def meta(size: Size) -> Decoder:
    with torch.device("meta"):
        return Decoder(size)


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", SIZES)
def test_every_size_scores_every_byte(name):
    tokens = torch.zeros(2, 16, dtype=torch.long, device="meta")
    assert meta(size(name))(tokens).shape == (2, 16, 256)


@pytest.mark.parametrize(
    ("name", "tied", "parameters"),
    [("1b", True, 1_235_814_400), ("3b", True, 3_212_749_824), ("8b", False, 8_030_261_248)],
)
def test_sizes_are_those_of_the_models_they_are_named_after(name, tied, parameters):
    assert count(meta(size(name, vocabulary=128_256, tied=tied))) == parameters


def test_scores_do_not_depend_on_later_tokens(model):
    tokens = torch.randint(256, (1, 12))
    changed = tokens.clone()
    changed[0, 7:] = 0
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])


def test_a_tied_head_is_the_embedding():
    tied = Decoder(dataclasses.replace(SMALL, tied=True))
    assert tied.head.weight is tied.embedding.weight
    assert count(tied) == count(Decoder(SMALL)) - 256 * 32


def test_the_same_seed_draws_the_same_weights(model):
    torch.manual_seed(0)
    again = Decoder(SMALL)
    for one, two in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, two)


def test_weights_can_be_drawn_after_meta_construction(model):
    late = meta(SMALL).to_empty(device="cpu")
    torch.manual_seed(0)
    late.reset_parameters()
    tokens = torch.randint(256, (1, 8))
    assert torch.isfinite(late(tokens)).all()
    # Not the same weights: at construction each layer first draws torch's own default.
    for one, two in zip(late.parameters(), model.parameters(), strict=True):
        assert one.std().item() == pytest.approx(two.std().item(), rel=0.2)


def test_parameter_names_are_stable(model):
    assert [name for name, _ in model.named_parameters() if not name.startswith("blocks.1")] == [
        "embedding.weight",
        "blocks.0.attn_norm.weight",
        "blocks.0.attn.q.weight",
        "blocks.0.attn.k.weight",
        "blocks.0.attn.v.weight",
        "blocks.0.attn.o.weight",
        "blocks.0.mlp_norm.weight",
        "blocks.0.mlp.gate.weight",
        "blocks.0.mlp.up.weight",
        "blocks.0.mlp.down.weight",
        "norm.weight",
        "head.weight",
    ]
    assert not list(model.named_buffers())


@pytest.mark.parametrize("tied", [False, True])
def test_the_plan_names_every_linear_layer(tied):
    model = Decoder(dataclasses.replace(SMALL, tied=tied))
    linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    named = {
        name for name in linear if any(fnmatch.fnmatch(name, pattern) for pattern in model.tp_plan)
    }
    assert linear - named == ({"head"} if tied else set())


def test_attention_of_some_heads_adds_up_to_that_of_all():
    """What a tensor rank does: a slice of the heads, its part of the output to be summed."""
    attention = Attention(SMALL)
    half = dataclasses.replace(SMALL, heads=2, kv_heads=1)
    parts = []
    for rank in range(2):
        part = Attention(SMALL)
        part.head_dim = half.dim // SMALL.heads
        for name, parameter in attention.named_parameters():
            rows = parameter.chunk(2, dim=1 if name.startswith("o") else 0)[rank]
            part.get_submodule(name.split(".")[0]).weight = nn.Parameter(rows)
        parts.append(part)
    x = torch.randn(2, 6, 32)
    torch.testing.assert_close(parts[0](x) + parts[1](x), attention(x))


def test_rotation_makes_products_depend_on_distance_only():
    q, k = torch.randn(2, 16)
    turned_q = rotate(q.expand(1, 1, 10, 16), 10_000.0)[0, 0]
    turned_k = rotate(k.expand(1, 1, 10, 16), 10_000.0)[0, 0]
    products = turned_q @ turned_k.T
    torch.testing.assert_close(products.diagonal(3), products[0, 3].expand(7), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(turned_q.norm(dim=-1), q.norm().expand(10))


def test_an_unknown_size_is_answered_with_those_there_are():
    with pytest.raises(ParallaxError) as error:
        size("huge")
    assert str(error.value) == (
        "The model size 'huge' was asked for; the sizes are tiny, small, 125m, 1b, 3b, 8b.\n\n"
        "Choose one of those, or build a parallax.train.decoder.Size of your own."
    )


def test_numbers_that_do_not_fit_are_explained():
    with pytest.raises(ParallaxError) as error:
        Size(dim=30, layers=1, heads=4, kv_heads=2, hidden=8)
    assert str(error.value) == (
        "dim=30 was asked for with heads=4: that gives heads of width 7.5, and rotary positions "
        "turn pairs of numbers.\n\nChoose dim as an even multiple of heads."
    )
    with pytest.raises(ParallaxError) as error:
        Size(dim=32, layers=1, heads=4, kv_heads=3, hidden=8)
    assert str(error.value) == (
        "heads=4 was asked for with kv_heads=3: each key head serves the same number of query "
        "heads.\n\nChoose kv_heads as a divisor of 4."
    )
