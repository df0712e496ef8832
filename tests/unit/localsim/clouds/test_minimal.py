"""The minimal provisioner; the rest of its behaviour is checked by the contract suite."""

import pytest

from spotfit.core.errors import ConfigError
from spotfit.provision.profile import open_provisioner


def test_missing_address_is_rejected_with_a_remedy() -> None:
    with pytest.raises(ConfigError, match="url") as raised:
        open_provisioner("plain")
    assert "sim://plain" in raised.value.do
