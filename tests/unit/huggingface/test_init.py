"""`spotfit.huggingface` imports transformers only when a name is used that needs it."""

from __future__ import annotations

import subprocess
import sys

import pytest

import spotfit.huggingface

PROBE = """
import sys
from spotfit.huggingface import TransformersTrainer, export_pretrained
TransformersTrainer(print)
assert not {"torch", "transformers", "accelerate"} & set(sys.modules)
"""


def test_creating_a_trainer_imports_no_framework() -> None:
    subprocess.run([sys.executable, "-c", PROBE], check=True)


def test_dir_lists_only_the_exported_names() -> None:
    offered = {name for name in dir(spotfit.huggingface) if not name.startswith("_")}
    assert offered == set(spotfit.huggingface.__all__)


def test_an_unknown_name_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        spotfit.huggingface.no_such_name  # noqa: B018
