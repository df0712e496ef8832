"""Frameworks on a GPU: a killed worker resumes, and does not change the result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("transformers")  # also for the imports of spotfit.huggingface
pytest.importorskip("lightning.pytorch")

from spotfit.huggingface import TransformersTrainer
from spotfit.lightning import LightningTrainer
from spotfit.torch import TorchTrainer
from tests.gpu import framework_scenarios
from tests.gpu.conftest import Measure
from tests.gpu.records import recorded, recovery_s
from tests.gpu.scenarios import SAVE_EVERY
from tests.live.cloud import LiveTestCloud

KILLED_AT = 8
FRAMEWORKS: dict[str, tuple[Callable[..., Any], type[TorchTrainer]]] = {
    "lightning": (framework_scenarios.train_with_lightning, LightningTrainer),
    "transformers": (framework_scenarios.train_with_transformers, TransformersTrainer),
}


@pytest.mark.timeout(180)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_killed_worker_resumes_with_equal_bits(
    cloud: LiveTestCloud, device: str, measure: Measure, framework: str
) -> None:
    undisturbed = fit(cloud, device, framework, "undisturbed")
    killed = fit(cloud, device, framework, "killed", kill_at=[KILLED_AT])
    starts = recorded(cloud.marks, "starts", "killed")
    assert {start["parent"] for start in starts} == {"spotfit-forksrv"}
    assert [start["parent_gpus"] for start in starts] == [[], []]
    assert starts[-1]["step"] == KILLED_AT // SAVE_EVERY * SAVE_EVERY
    # The step of the kill is trained again, as the last save was before it.
    seconds = recovery_s(cloud.marks, "killed", step=starts[-1]["step"] + 1)
    measure("SIGKILL to the next step", seconds, "s", at_most=20)
    assert killed["digest"] == undisturbed["digest"]
    assert killed["device"].partition(":")[0] == device


def fit(
    cloud: LiveTestCloud, device: str, framework: str, label: str, **config: Any
) -> dict[str, Any]:
    """Train with one worker and return what it returned."""
    function, trainer_type = FRAMEWORKS[framework]
    result = cloud.fit(
        function,
        workers=1,
        max_failures=len(config.get("kill_at", ())),
        name=label,
        trainer_type=trainer_type,
        scaling_options={"use_gpu": device == "cuda"},
        config={"seed": 7, "label": label, **config},
    )
    value: dict[str, Any] = result.return_value
    return value
