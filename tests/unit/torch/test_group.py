"""What the ranks of a training tell each other."""

from __future__ import annotations

import pytest

from spotfit.core.errors import ConfigError
from spotfit.torch.group import broadcast, check_group, gathered


def test_one_alone_hears_itself() -> None:
    assert (gathered("mine"), broadcast("mine")) == (["mine"], "mine")


@pytest.mark.usefixtures("group")
def test_so_does_a_group_of_one() -> None:
    assert (gathered("mine"), broadcast("mine")) == (["mine"], "mine")
    check_group(1)


def test_who_is_missing_from_torchs_group_is_told() -> None:
    check_group(1)
    with pytest.raises(ConfigError, match="process group of all 2 workers; here it has 1"):
        check_group(2)
