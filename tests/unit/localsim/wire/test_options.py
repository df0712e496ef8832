"""What can be chosen of a simulated cloud."""

import pytest

from spotfit.core.errors import ConfigError
from spotfit_localsim.wire.options import CLOUDS, SimOptions
from spotfit_localsim.wire.simulator import load_cloud


@pytest.mark.parametrize("name", sorted(CLOUDS))
def test_every_cloud_of_the_list_can_be_had(name: str) -> None:
    kind = load_cloud(SimOptions(cloud=name).cloud)
    assert kind.Memory() == kind.Memory()
    access = kind.access("http://127.0.0.1:1")
    assert all(isinstance(text, str) for text in access.environment.values())


def test_a_cloud_that_nobody_simulates_is_told_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'plain'"):
        SimOptions(cloud="plan")


def test_a_market_that_cannot_be_is_refused_here_too() -> None:
    with pytest.raises(ConfigError, match="boot_s"):
        SimOptions(boot_s=-1.0)
