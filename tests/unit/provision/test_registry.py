"""A provisioner by name: a wrong name or option is told before anything is asked for."""

import pytest

from spotfit.core.errors import ConfigError
from spotfit.provision.registry import open_provisioner, provisioner_names


def test_the_local_one_is_always_there() -> None:
    assert "local" in provisioner_names()


def test_a_misspelt_name_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"no provisioner 'locl'. Did you mean 'local'"):
        open_provisioner("locl")


def test_an_option_it_does_not_take_is_named() -> None:
    with pytest.raises(ConfigError, match="no_such_option"):
        open_provisioner("local", {"no_such_option": 1})
