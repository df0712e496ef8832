"""What only a GPU can show of training with JAX; rows of `make gpu` where jax is installed."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

import spotfit
from spotfit.jax import JaxTrainer
from tests.gpu import jax_scenarios
from tests.gpu.conftest import Measure
from tests.gpu.records import recorded, recovery_s
from tests.gpu.test_gpu import CPU_WIDTH, GPU_WIDTH, MIB, state_layers
from tests.live.cloud import LiveTestCloud

_INSTALL = "pip install 'jax[cuda12]' or 'jax[cuda13]'"

pytestmark = pytest.mark.skipif(
    find_spec("jax") is None, reason=f"jax is not installed; {_INSTALL}"
)


def fit(cloud: LiveTestCloud, device: str, label: str, **config: Any) -> dict[str, Any]:
    """Train with one worker, and return what it returned."""
    if device == "cuda" and not any(map(find_spec, ("jax_cuda12_plugin", "jax_cuda13_plugin"))):
        pytest.skip(f"this jax cannot use a GPU: {_INSTALL}")
    result = cloud.fit(
        config.pop("function", jax_scenarios.train),
        max_failures=len(config.get("kill_at", ())),
        name=label,
        trainer_type=JaxTrainer,
        scaling_options={"use_gpu": device == "cuda"},
        config={"seed": 7, "label": label, **config},
        # Otherwise each run may compile other kernels, which are chosen by their measured times.
        worker_runtime_env={"env_vars": {"XLA_FLAGS": "--xla_gpu_deterministic_ops=true"}},
        # The files of a state of gigabytes must not fill the disk.
        checkpoint_config=spotfit.CheckpointConfig(num_to_keep=1),
    )
    value: dict[str, Any] = result.return_value
    return value


@pytest.mark.timeout(180)
def test_a_killed_worker_of_jax_continues_from_memory(
    cloud: LiveTestCloud, device: str, measure: Measure
) -> None:
    undisturbed = fit(cloud, device, "undisturbed")
    killed = fit(cloud, device, "killed", kill_at=[8])
    assert undisturbed["devices"] == ["gpu" if device == "cuda" else "cpu"]
    starts = recorded(cloud.marks, "starts", "killed")
    assert [(start["source"], start["step"]) for start in starts] == [("", 0), ("memory", 6)]
    # The memory of the killed process is free: JAX reserves most of a GPU when it starts.
    seconds = recovery_s(cloud.marks, "killed", step=7)
    measure("SIGKILL to the next step", seconds, "s", at_most=20)
    measure("restore()", starts[-1]["restore_s"], "s")
    assert killed == undisturbed
    assert killed["steps"] == jax_scenarios.STEPS


def test_workers_of_jax_are_forked_by_a_server_that_has_not_opened_a_gpu(
    cloud: LiveTestCloud, device: str
) -> None:
    trained = fit(cloud, device, "run")
    (start,) = recorded(cloud.marks, "starts", "run")
    assert (start["parent"], start["parent_gpus"]) == ("spotfit-forksrv", [])
    assert trained["devices"] == ["gpu" if device == "cuda" else "cpu"]


@pytest.mark.timeout(180)
def test_a_save_of_jax_blocks_for_little_more_than_the_copy(
    cloud: LiveTestCloud, device: str, measure: Measure
) -> None:
    found = fit(
        cloud,
        device,
        "run",
        function=jax_scenarios.save_often,
        width=GPU_WIDTH if device == "cuda" else CPU_WIDTH,
        layers=state_layers(cloud.folder) if device == "cuda" else 2,
        rounds=5 if device == "cuda" else 1,
    )
    measure("state", found["bytes"] / MIB, "MiB")
    measure("device to main memory", found["bytes"] / found["copy_s"] / 1e9, "GB/s")
    # Each array is copied to shared memory while the next ones are transferred.
    measure("save / copy", found["save_s"] / found["copy_s"], at_most=1.5)
