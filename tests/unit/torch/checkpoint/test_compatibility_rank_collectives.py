"""Collectives over the ranks of a training."""

from __future__ import annotations

import pytest

from spotfit.core.errors import ConfigError
from spotfit.torch.checkpoint.compatibility import all_gather, broadcast, check_process_group


def test_without_a_group_collectives_return_the_own_value() -> None:
    assert (all_gather("value"), broadcast("value")) == (["value"], "value")


@pytest.mark.usefixtures("group")
def test_in_a_group_of_one_collectives_return_the_own_value() -> None:
    assert (all_gather("value"), broadcast("value")) == (["value"], "value")
    check_process_group(1)


def test_a_process_group_of_another_size_is_rejected() -> None:
    check_process_group(1)
    with pytest.raises(ConfigError, match="process group of all 2 workers, but the group has 1"):
        check_process_group(2)
