"""What only a GPU can show: `make gpu` prints a table of these tests."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import spotfit
from spotfit.frameworks.torch.torch_config import TorchConfig
from spotfit.torch import TorchTrainer
from tests.gpu import scenarios
from tests.gpu.conftest import Measure
from tests.gpu.records import recorded, recovery_s
from tests.live.cloud import LiveTestCloud

MIB = 2**20
RESTARTS = {"cpu": 3, "cuda": 20}
MAX_STATE_BYTES = 4096 * MIB
CPU_WIDTH, GPU_WIDTH = 256, 4096


def layer_bytes(width: int) -> int:
    """A square weight of floats and the two averages of AdamW."""
    return width * width * 4 * 3


def workers_of(device: str) -> int:
    """Two workers, with a GPU each; one on a machine with a single GPU, as NCCL needs one each."""
    return min(2, torch.cuda.device_count()) if device == "cuda" else 2


def fit(cloud: LiveTestCloud, device: str, label: str, **config: Any) -> dict[str, Any]:
    """Train and return what rank 0 returned."""
    config = {"seed": 7, "label": label, **config}
    result = cloud.fit(
        config.pop("function", scenarios.train),
        workers=config.pop("workers", workers_of(device)),
        max_failures=config.get("kills", len(config.get("kill_at", ()))),
        name=config.pop("run", label),
        trainer_type=TorchTrainer,
        scaling_options={"use_gpu": device == "cuda", **config.pop("scaling", {})},
        config=config,
        # The files of a state of gigabytes must not fill the disk.
        checkpoint_config=spotfit.CheckpointConfig(num_to_keep=1),
    )
    value: dict[str, Any] = result.return_value
    return value


def test_workers_are_forked_by_a_server_that_has_not_opened_a_gpu(
    cloud: LiveTestCloud, device: str
) -> None:
    trained = fit(cloud, device, "run")
    starts = recorded(cloud.marks, "starts", "run")
    assert {start["parent"] for start in starts} == {"spotfit-forksrv"}
    assert [start["parent_gpus"] for start in starts] == [[]] * workers_of(device)
    assert {name.partition(":")[0] for name in trained["devices"]} == {device}


@pytest.mark.timeout(180)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_a_killed_worker_continues_from_memory(
    cloud: LiveTestCloud, device: str, measure: Measure, strategy: str
) -> None:
    undisturbed = fit(cloud, device, "undisturbed", strategy=strategy)
    killed = fit(cloud, device, "killed", strategy=strategy, kill_at=[8])
    assert undisturbed["backend"] == ("nccl" if device == "cuda" else "gloo")
    last = recorded(cloud.marks, "starts", "killed")[-1]
    assert (last["source"], last["step"]) == ("memory", 6)
    measure("workers", undisturbed["world_size"])
    seconds = recovery_s(cloud.marks, "killed", step=7)
    measure("SIGKILL to the next step", seconds, "s", at_most=20)
    assert killed["digest"] == undisturbed["digest"]


@pytest.mark.timeout(180)
def test_a_second_run_continues_from_the_bucket(
    cloud: LiveTestCloud, device: str, measure: Measure
) -> None:
    undisturbed = fit(cloud, device, "undisturbed")
    with pytest.raises(spotfit.WorkerGroupError):
        cloud.fit(
            scenarios.train,
            workers=workers_of(device),
            name="run",
            trainer_type=TorchTrainer,
            scaling_options={"use_gpu": device == "cuda"},
            config={"seed": 7, "label": "first", "kill_at": [8]},
        )
    resumed = fit(cloud, device, "second", run="run")
    start = recorded(cloud.marks, "starts", "second")[-1]
    assert start["source"] == "bucket"
    measure("restore()", start["restore_s"], "s")
    assert resumed["digest"] == undisturbed["digest"]


@pytest.mark.timeout(180)
def test_two_runs_with_one_seed_end_with_the_same_bits(cloud: LiveTestCloud, device: str) -> None:
    first, second = fit(cloud, device, "first"), fit(cloud, device, "second")
    assert first["digest"] == second["digest"]
    assert fit(cloud, device, "third", seed=8)["digest"] != first["digest"]


def state_layers(folder: Path) -> int:
    """Return the number of layers of a state that fits into this machine several times.

    Two snapshots are in shared memory and one copy in pinned memory, and files of several saves in
    `folder`. With few tensors and gigabytes the copy takes most of a save, as for a real model.
    """
    free_bytes, _ = torch.cuda.mem_get_info()
    limits = (
        MAX_STATE_BYTES,
        free_bytes / 4,
        shutil.disk_usage(scenarios.SHARED_MEMORY).free / 3,
        os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 5,
        shutil.disk_usage(folder).free / 8,
    )
    return max(1, int(min(limits) / layer_bytes(GPU_WIDTH)))


@pytest.mark.timeout(180)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_a_save_blocks_for_little_more_than_the_copy(
    cloud: LiveTestCloud, device: str, measure: Measure, strategy: str
) -> None:
    found = fit(
        cloud,
        device,
        "run",
        function=scenarios.save_often,
        workers=1,
        strategy=strategy,
        width=GPU_WIDTH if device == "cuda" else CPU_WIDTH,
        layers=state_layers(cloud.folder) if device == "cuda" else 2,
        rounds=5 if device == "cuda" else 1,
    )
    assert found["is_pinned"] == (device == "cuda")
    measure("state", found["bytes"] / MIB, "MiB")
    measure("device to pinned memory", found["bytes"] / found["copy_s"] / 1e9, "GB/s")
    measure("save / copy", found["save_s"] / found["copy_s"], at_most=1.1)


def test_workers_that_share_a_gpu_train_together(cloud: LiveTestCloud, device: str) -> None:
    scaling = {"resources_per_worker": {"GPU": 0.5}} if device == "cuda" else {}
    if device == "cuda" and torch.cuda.device_count() > 1:
        pytest.skip("shared GPUs are assigned in turn: only one worker per GPU on this machine")
    found = fit(cloud, device, "run", function=scenarios.share_a_device, workers=2, scaling=scaling)
    assert found["backend"] == "gloo"
    assert len(set(found["digests"])) == 1
    assert len(found["devices"]) == 2
    assert len(set(found["devices"])) == 1


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() != 1, reason="needs exactly one GPU")
def test_nccl_between_workers_that_share_a_gpu_is_an_error(cloud: LiveTestCloud) -> None:
    trainer = TorchTrainer(
        scenarios.share_a_device,
        train_loop_config={},
        scaling_config=spotfit.ScalingConfig(
            num_workers=2, use_gpu=True, resources_per_worker={"GPU": 0.5}
        ),
        run_config=spotfit.RunConfig(name="run", storage_path=cloud.storage),
        torch_config=TorchConfig(backend="nccl"),
        provisioner=cloud.options(),
    )
    with pytest.raises(spotfit.WorkerGroupError, match=r"NCCL|Duplicate GPU"):
        trainer.fit()


@pytest.mark.timeout(300)
def test_restarts_leak_no_memory(cloud: LiveTestCloud, device: str, measure: Measure) -> None:
    restarts = RESTARTS[device]
    # Another step each time: rounds that end without a new checkpoint are repeated after pauses.
    kill_at = list(range(2, 2 + restarts))
    fit(cloud, device, "run", workers=1, every=1, kill_at=kill_at)
    starts = recorded(cloud.marks, "starts", "run")
    assert len(starts) == restarts + 1
    # The first start has no state to restore, and the second is the first with a snapshot.
    first, last = starts[1], starts[-1]
    for name, title in (
        ("device_bytes", "GPU"),
        ("shm_bytes", "shared memory"),
        ("agent_bytes", "agent"),
    ):
        measure(f"growth of {title}", (last[name] - first[name]) / MIB, "MiB", at_most=32)
