"""Options of a simulated cloud."""

import pytest

from spotfit.core.errors import ConfigError
from spotfit_localsim.clouds.options import CLOUDS, SimOptions
from spotfit_localsim.clouds.simulator import load_cloud


@pytest.mark.parametrize("name", sorted(CLOUDS))
def test_every_cloud_can_be_loaded(name: str) -> None:
    kind = load_cloud(SimOptions(cloud=name).cloud)
    assert kind.State() == kind.State()
    access = kind.client_access("http://127.0.0.1:1")
    assert all(isinstance(text, str) for text in access.environment.values())


def test_unknown_cloud_is_reported_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'plain'"):
        SimOptions(cloud="plan")


def test_unknown_firewall_is_reported_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="'machines'"):
        SimOptions(firewall="machine")


def test_invalid_market_options_are_rejected() -> None:
    with pytest.raises(ConfigError, match="boot_s"):
        SimOptions(boot_s=-1.0)
