"""RNG states of Python and numpy continue where they were saved."""

from __future__ import annotations

import random

import numpy as np

from spotfit.frameworks.host_rng import host_rng_state, set_host_rng_state


def test_restored_states_give_the_same_numbers() -> None:
    np.random.seed(3)
    state = host_rng_state()
    first = random.random(), np.random.random()
    set_host_rng_state(state)
    assert (random.random(), np.random.random()) == first
