"""`spotfit.torch` costs nothing until it is used."""

from __future__ import annotations

import subprocess
import sys

import pytest

import spotfit.torch

PROBE = """
import sys
from spotfit.torch import TorchTrainer, TorchConfig, prepare_model
TorchTrainer(print, torch_config=TorchConfig())
assert "torch" not in sys.modules
"""


def test_a_trainer_is_made_without_torch() -> None:
    subprocess.run([sys.executable, "-c", PROBE], check=True)


def test_every_name_leads_somewhere() -> None:
    for name in spotfit.torch.__all__:
        assert getattr(spotfit.torch, name).__doc__
    assert set(spotfit.torch.__all__) <= set(dir(spotfit.torch))


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        spotfit.torch.no_such_name  # noqa: B018
