"""The global random generators of the user's process: seeded for a slice, then restored."""

from __future__ import annotations

import random  # noqa: TID251 - seeds and restores the RNG of the user's code
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np


@contextmanager
def seeded_generators() -> Iterator[Callable[[int], None]]:
    """Yield a function that seeds the global generators of `random`, NumPy and torch, from 64 bits.

    torch is seeded if it is imported, only its generator of the CPU. At the end the generators have
    the states of the beginning, so that transforms do not change the random numbers of the loop.
    """
    python_state, numpy_state = random.getstate(), np.random.get_state()
    torch: Any = sys.modules.get("torch")
    generator = torch.default_generator if torch else None
    torch_state = generator.get_state() if generator else None

    def seed(key: int) -> None:
        random.seed(key)
        # The third word: the two would otherwise have the same numbers, by the same algorithm.
        np.random.seed([key & 0xFFFFFFFF, key >> 32, 1])
        if generator:
            generator.manual_seed(key)

    try:
        yield seed
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        if generator:
            generator.set_state(torch_state)
