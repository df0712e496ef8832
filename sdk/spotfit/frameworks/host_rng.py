"""RNG states of Python and numpy, which training functions of all frameworks may use."""

from __future__ import annotations

import random  # noqa: TID251 - saves and restores the RNG of the user's code
import sys
from collections.abc import Mapping
from typing import Any


def host_rng_state() -> dict[str, Any]:
    """Return the RNG states of Python, and of numpy if it is imported. Of plain values."""
    state: dict[str, Any] = {"python": random.getstate()}
    if (numpy := sys.modules.get("numpy.random")) is not None:
        # A list, because an array would be one of a framework.
        kind, keys, position, has_gauss, gauss = numpy.get_state()
        state["numpy"] = (kind, keys.tolist(), position, has_gauss, gauss)
    return state


def set_host_rng_state(state: Mapping[str, Any]) -> None:
    """Set the RNG states to those of `host_rng_state`; that of numpy if it has one."""
    random.setstate(state["python"])
    if "numpy" in state:
        import numpy

        numpy.random.set_state(state["numpy"])
