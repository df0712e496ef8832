"""Invalid options raise when they are constructed."""

import pytest

from spotfit.core.errors import ConfigError
from spotfit_provisioners.local.options import LocalOptions


@pytest.mark.parametrize(
    "wrong",
    [{"nodes": 0}, {"capacity": -1}, {"notice_s": -1.0}, {"idle_s": -0.5}, {"python": 3.12}],
)
def test_invalid_values_are_rejected(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        LocalOptions(**wrong)  # type: ignore[arg-type]  # intentionally invalid
