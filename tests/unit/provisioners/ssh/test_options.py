"""What can be chosen of hosts by ssh, and what cannot be meant."""

from __future__ import annotations

from typing import Any

import pytest

from spotfit.core.errors import ConfigError
from spotfit_provisioners.ssh.options import SshOptions


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"workers_per_node": 0}, "workers_per_node"),
        ({"connect_timeout_s": 0.5}, "connect_timeout_s"),
        ({"grace_s": -1.0}, "grace_s"),
        ({"hosts": ("a", "b", "a")}, "a more than once"),
        ({"hosts": ("-oProxyCommand=evil",)}, "is empty or starts with"),
        ({"hosts": ("",)}, "is empty or starts with"),
        ({"environment": {"A B": "1"}}, "A B"),
        ({"host_key_checking": "off"}, "host_key_checking='off'"),
    ],
)
def test_what_cannot_be_meant_is_told(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        SshOptions(**wrong)


def test_strangers_are_not_trusted_unless_told_so() -> None:
    assert SshOptions().host_key_checking == "strict"
