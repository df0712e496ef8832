"""Options of the ssh backend."""

from __future__ import annotations

from typing import Any

import pytest

from spotfit.core.errors import ConfigError
from spotfit_provisioners.ssh.options import SshOptions


@pytest.mark.parametrize(
    ("wrong", "expected"),
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
def test_invalid_values_are_rejected(wrong: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        SshOptions(**wrong)


def test_unknown_host_keys_are_rejected_by_default() -> None:
    assert SshOptions().host_key_checking == "strict"
