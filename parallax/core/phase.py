"""The order of rewrites. Each phase has one reason to stand where it stands."""

from __future__ import annotations

from enum import IntEnum


class Phase(IntEnum):
    """When a rewrite runs. Rewrites of one phase must commute."""

    # Decides which modules and names exist; every later phase speaks of names.
    SURGERY = 0
    # Cuts the model into stages; later phases run once per part.
    SPLIT = 1
    # Makes DTensors on inner axes; fully_shard extends a DTensor's mesh outwards, never inwards.
    TENSOR = 2
    # Wraps forwards for recomputation; inside STORE's hooks, so that a recomputed block finds its
    # parameters already gathered.
    RECOMPUTE = 3
    # Compiles blocks as they stand; STORE's hooks stay outside the compiled region.
    COMPILE = 4
    # Decides dtype, residency and sharding of every parameter, once per module.
    STORE = 5
    # Gives meta tensors their values, when each rank holds only its own shard.
    FILL = 6
    # Points the optimizer at the parameters that exist now; no parameter is replaced afterwards.
    BIND = 7
    # From here on `update` and `grad` are wrapped, inner to outer.
    # Averages see the weights after the optimizer's own step, and only if it took place.
    AVERAGE = 8
    # Clips the gradient the optimizer is about to use, after it was unscaled.
    CLIP = 9
    # Scales the loss and unscales gradients; may skip the update, hence outside CLIP.
    SCALE = 10
    # Runs `grad` several times before one `update`; outermost.
    ACCUMULATE = 11
