import pytest
import torch

from parallax.train.sample import generate

CPU = torch.device("cpu")


def successor(tokens):
    """Scores the byte after each input byte highest."""
    return torch.nn.functional.one_hot((tokens + 1) % 256, 256).float() * 50


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_each_byte_continues_the_one_before(temperature):
    text = generate(successor, "ab", length=4, window=8, device=CPU, temperature=temperature)
    assert text == "abcdef"


def test_the_model_sees_one_shape_and_the_end_of_a_long_text():
    shapes = set()

    def model(tokens):
        shapes.add(tuple(tokens.shape))
        return successor(tokens)

    assert generate(model, "A", length=9, window=4, device=CPU, temperature=0) == "ABCDEFGHIJ"
    assert shapes == {(1, 4)}


def test_the_seed_decides_the_draws():
    def model(tokens):
        scores = torch.full((*tokens.shape, 256), -torch.inf)
        scores[..., 97:123] = 0.0
        return scores

    texts = [generate(model, "a", length=20, window=4, device=CPU, seed=seed) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]
