"""Booster: a composition behind the calls of a training script written for ColossalAI.

The names and arguments are those of its Booster; everything is carried out by the transforms.
`docs/migrating.md` answers for every method, plugin and knob.
"""

from parallax.booster.booster import Booster
from parallax.booster.preset import Preset

__all__ = ["Booster", "Preset"]
