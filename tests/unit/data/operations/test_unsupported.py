"""Methods of Ray that are refused."""

from __future__ import annotations

import pytest

import spotfit.data
from spotfit.core.errors import ConfigError
from spotfit.data.operations.unsupported import REFUSED_METHODS


@pytest.mark.parametrize("name", sorted(REFUSED_METHODS))
def test_a_refused_method_names_a_way_to_the_result(name: str) -> None:
    method = getattr(spotfit.data.range(3), name)
    with pytest.raises(ConfigError, match=rf"Dataset\.{name}\(\) is not supported") as caught:
        method("argument", keyword=1)
    assert caught.value.do == REFUSED_METHODS[name]
    assert REFUSED_METHODS[name] in method.__doc__
