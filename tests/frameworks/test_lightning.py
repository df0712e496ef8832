"""Lightning in real workers: killed workers and machines do not change the result."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("lightning.pytorch")

from spotfit.lightning import LightningTrainer
from tests.frameworks.lightning_digits import EPOCHS, WORKERS, train
from tests.live.cloud import LiveTestCloud


def fit(cloud: LiveTestCloud, label: str, **config: Any) -> str:
    """Return the hash of the weights of one run on two machines."""
    kills = config.get("kills", [])
    result = cloud.fit(
        train,
        name=label,
        workers=WORKERS,
        nodes=2,
        trainer_type=LightningTrainer,
        max_failures=len(kills),
        config={"label": label, **config},
    )
    assert len(cloud.rounds_opened(label)) == len(kills) + 1
    return str(result.return_value)


def metrics(cloud: LiveTestCloud, label: str) -> list[dict[str, float]]:
    """Return what was logged at the end of each epoch."""
    return [
        json.loads((cloud.marks / f"metrics-{label}-{epoch}").read_text())
        for epoch in range(EPOCHS)
    ]


CASES = {
    "lightning": {},
    "pytorch_lightning": {"package": "pytorch_lightning"},
    "accumulation": {"trainer": {"accumulate_grad_batches": 3}, "loader_workers": 1},
    "validation_within_epochs": {"trainer": {"val_check_interval": 4}},
    "max_steps": {"trainer": {"max_steps": 50}},
}


@pytest.mark.parametrize("case", CASES)
def test_killed_workers_do_not_change_weights_and_logged_values(
    cloud: LiveTestCloud, case: str
) -> None:
    config = CASES[case]
    undisturbed = fit(cloud, "undisturbed", **config)
    killed = fit(cloud, "killed", **config, kills=[[8, 1], [29, 3], [30, 0]])
    assert killed == undisturbed
    assert metrics(cloud, "killed") == metrics(cloud, "undisturbed")
