"""`import spotfit` imports public names on first access."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata

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


def test_only_used_names_are_imported() -> None:
    subprocess.run([sys.executable, "-c", PROBE], check=True)


def test_every_public_name_can_be_accessed() -> None:
    assert list(spotfit.__all__) == sorted(spotfit.__all__)
    for name in spotfit.__all__:
        assert getattr(spotfit, name) is not None
    assert set(spotfit.__all__) <= set(dir(spotfit))


def test_completion_offers_public_names_only() -> None:
    offered = {name for name in dir(spotfit) if not name.startswith("__")}
    assert offered == {*spotfit.__all__, *spotfit._PUBLIC_SUBMODULES}
    assert "__version__" in dir(spotfit)


def test_the_version_is_that_of_the_installed_package() -> None:
    assert spotfit.__version__ == metadata.version("spotfit")


def test_an_unknown_name_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        spotfit.no_such_name  # noqa: B018
