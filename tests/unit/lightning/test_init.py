"""`spotfit.lightning` imports Lightning and torch only when a class is used."""

from __future__ import annotations

import subprocess
import sys

import pytest

import spotfit.lightning

PROBE = """
import sys
import spotfit.lightning
from spotfit.lightning import LightningTrainer
LightningTrainer(print)
assert not {"torch", "lightning", "pytorch_lightning"} & set(sys.modules)
"""


def test_creating_a_trainer_does_not_import_lightning() -> None:
    subprocess.run([sys.executable, "-c", PROBE], check=True)


def test_dir_lists_only_the_exported_names() -> None:
    offered = {name for name in dir(spotfit.lightning) if not name.startswith("_")}
    assert offered == set(spotfit.lightning.__all__)


def test_an_unknown_name_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        spotfit.lightning.no_such_name  # noqa: B018
