"""Opening a provisioner by name: a wrong name or option is reported before any request."""

import pytest

from spotfit.core.errors import ConfigError
from spotfit.provision.profile import open_provisioner


def test_an_installed_provisioner_is_opened_by_name() -> None:
    assert open_provisioner("local").name == "local"


def test_an_unknown_name_suggests_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match=r"no provisioner 'locl'. Did you mean 'local'"):
        open_provisioner("locl")


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(ConfigError, match="no_such_option"):
        open_provisioner("local", {"no_such_option": 1})
