"""Text out of a trained model."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from parallax.train.text import decode, encode


@torch.no_grad()
def generate(
    model: Callable[[Tensor], Tensor],
    prompt: str,
    *,
    length: int,
    window: int,
    device: torch.device,
    temperature: float = 0.8,
    seed: int = 0,
) -> str:
    """Continues a text. All ranks call it together and get the same answer.

    Args:
        model: Token ids [1, window] to scores [1, window, vocabulary].
        prompt: The text to continue; at least one byte.
        length: How many bytes to add.
        window: How many bytes the model sees at once.
        device: Where the model is.
        temperature: What the scores are divided by: lower is more predictable, 0 takes the best.
        seed: Of the draws.

    Returns:
        The prompt and what follows it.
    """
    tokens = encode(prompt)
    draws = torch.Generator().manual_seed(seed)
    for _ in range(length):
        seen = tokens[-window:]
        # Padded to one shape, on the right, where causal attention cannot look: a compiled model
        # would otherwise be compiled anew for each length.
        padded = torch.zeros(1, window, dtype=torch.long)
        padded[0, : len(seen)] = seen
        scores = model(padded.to(device))[0, len(seen) - 1].float().cpu()
        token = _draw(scores, temperature, draws)
        if dist.is_initialized() and dist.get_world_size() > 1:
            # Equal weights and seeds do not promise equal bits on different devices, and ranks
            # that continued different texts would be mixed up by tensor parallelism.
            shared = token.to(device)
            dist.broadcast(shared, src=0)
            token = shared.cpu()
        tokens = torch.cat((tokens, token))
    return decode(tokens)


def _draw(scores: Tensor, temperature: float, draws: torch.Generator) -> Tensor:
    if temperature == 0:
        return scores.argmax().reshape(1)
    return torch.multinomial((scores / temperature).softmax(dim=-1), 1, generator=draws)
