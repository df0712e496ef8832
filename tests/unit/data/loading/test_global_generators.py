from __future__ import annotations

import random
from contextlib import suppress

import numpy as np
import pytest
import torch

from spotfit.data.loading.global_generators import seeded_generators


def numbers() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


@pytest.mark.parametrize("key", [0, 1, 2**64 - 1])
def test_a_key_determines_the_numbers_of_all_generators(key: int) -> None:
    with seeded_generators() as seed:
        seed(key)
        first = numbers()
        seed(key)
        assert numbers() == first
        seed(key ^ 1)
        assert len({*first, *numbers()}) == 6


def test_the_generators_continue_as_if_nothing_had_been_drawn() -> None:
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = numbers()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    with suppress(ZeroDivisionError), seeded_generators() as seed:
        seed(7)
        numbers()
        raise ZeroDivisionError

    assert numbers() == expected
