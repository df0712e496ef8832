"""The plainest cloud: its provisioner refuses to guess where it is. The rest is the suite's."""

import pytest

from spotfit.core.errors import ConfigError
from spotfit.provision.profile import open_provisioner


def test_without_an_address_it_says_what_to_try() -> None:
    with pytest.raises(ConfigError, match="url") as told:
        open_provisioner("plain")
    assert "sim://plain" in told.value.do
