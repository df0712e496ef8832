"""`import spotfit` offers every public name, and imports each when it is first used."""

from __future__ import annotations

import subprocess
import sys

import pytest

import spotfit

PROBE = """
import sys
import spotfit
ours = [name for name in sys.modules if name.startswith("spotfit")]
assert ours == ["spotfit"], ours
spotfit.ScalingConfig
assert "spotfit.model.config" in sys.modules
assert "spotfit.client" not in sys.modules
assert spotfit.torch.get_device and spotfit.collective.barrier
assert "torch" not in sys.modules
"""


def test_only_what_is_used_is_imported() -> None:
    subprocess.run([sys.executable, "-c", PROBE], check=True)


def test_every_name_leads_somewhere_and_is_offered() -> None:
    assert list(spotfit.__all__) == sorted(spotfit.__all__)
    for name in spotfit.__all__:
        assert getattr(spotfit, name) is not None
    assert set(spotfit.__all__) <= set(dir(spotfit))


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        spotfit.no_such_name  # noqa: B018
