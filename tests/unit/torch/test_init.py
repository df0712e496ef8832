"""`spotfit.torch` imports torch only when a name is used."""

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


def test_creating_a_trainer_does_not_import_torch() -> None:
    subprocess.run([sys.executable, "-c", PROBE], check=True)


def test_every_exported_name_can_be_imported() -> None:
    for name in spotfit.torch.__all__:
        assert getattr(spotfit.torch, name).__doc__


def test_dir_lists_only_the_exported_names() -> None:
    offered = {name for name in dir(spotfit.torch) if not name.startswith("_")}
    assert offered == set(spotfit.torch.__all__)


def test_an_unknown_name_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        spotfit.torch.no_such_name  # noqa: B018
