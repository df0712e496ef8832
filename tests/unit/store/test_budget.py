"""How long a call may insist is the caller's to say, and saying it costs nothing."""

import subprocess
import sys

import pytest

from spotfit.core.errors import TransientStoreError
from spotfit.store.budget import Budget
from spotfit.store.opening import open_store
from tests.unit.store.conftest import ScriptedBucket


def test_who_asks_again_itself_is_told_of_the_first_failure(bucket: ScriptedBucket) -> None:
    bucket.will_answer(503)
    hasty = open_store(bucket.url, Budget(attempts=1))
    with pytest.raises(TransientStoreError):
        hasty.get("a")
    assert len(bucket.asked) == 1


def test_to_open_a_store_imports_nothing_that_repeats_calls() -> None:
    story = """
import sys
import spotfit.store.budget, spotfit.store.opening
assert "tenacity" not in sys.modules
"""
    subprocess.run(
        [sys.executable, "-c", story], check=True, env={"PYTHONPATH": ":".join(sys.path)}
    )
