"""Batches of datasets on a GPU: values, copies beside the computation, and memory."""

from __future__ import annotations

import gc
import math
import os
import time
from collections.abc import Callable, Iterable
from functools import partial
from statistics import median

import pytest
import torch

import spotfit
from spotfit.torch import TorchTrainer
from tests.gpu import scenarios
from tests.gpu.conftest import Measure
from tests.live.cloud import LiveTestCloud

MIB = 2**20
PREFETCH = 2
COMPUTE_PER_COPY = 1.25
"""Time of the computation of a batch, relative to that of its blocking copy."""

Compute = Callable[[torch.Tensor], None]


def test_a_shard_has_each_row_once_on_the_device_of_its_worker(
    cloud: LiveTestCloud, device: str
) -> None:
    workers = min(2, torch.cuda.device_count()) if device == "cuda" else 2
    rows = 4_000
    result = cloud.fit(
        scenarios.read_shard,
        workers=workers,
        trainer_type=TorchTrainer,
        scaling_options={"use_gpu": device == "cuda"},
        datasets={"train": spotfit.data.range(rows).random_shuffle(seed=1)},
        config={"columns": 20_000 if device == "cuda" else 20},
    )
    found = result.return_value
    assert sorted(found["rows"]) == list(range(rows))
    assert found["wrong_batches"] == 0
    assert {name.partition(":")[0] for name in found["devices"]} == {device}


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("memory", "goal"), [("pinned", 0.75), ("pageable", None)])
def test_copies_overlap_with_the_computation(
    device: str, measure: Measure, memory: str, goal: float | None
) -> None:
    """The collate function returns the same tensor for every batch, so that only copies take time.

    From pageable memory the driver copies through a buffer of its own, which has no goal.
    """
    size_bytes = 256 * MIB if device == "cuda" else MIB
    host = torch.ones(size_bytes // 4, pin_memory=memory == "pinned" and device == "cuda")
    copy_s = median([seconds_of(partial(host.to, device), device) for _ in range(5)])
    compute = computation(COMPUTE_PER_COPY * copy_s, device)

    def batches_on(target: str) -> Iterable[torch.Tensor]:
        return spotfit.data.range(30).iter_torch_batches(
            batch_size=1, device=target, prefetch_batches=PREFETCH, collate_fn=lambda _batch: host
        )

    blocking_s = loop_s((batch.to(device) for batch in batches_on("cpu")), compute, device)
    overlapped_s = loop_s(batches_on(device), compute, device)
    measure("blocking copy", size_bytes / copy_s / 1e9, "GB/s")
    measure("loop / loop with blocking copies", overlapped_s / blocking_s, at_most=goal)


@pytest.mark.timeout(120)
def test_a_loop_that_is_ahead_of_its_gpu_holds_few_batches(device: str, measure: Measure) -> None:
    """The loop does not wait for the GPU, which takes longer for a batch than its preparation."""
    values = 2 * MIB if device == "cuda" else 1_000
    compute = computation(0.03 if device == "cuda" else 1e-4, device)
    batches = spotfit.data.range(40).iter_torch_batches(
        batch_size=1,
        device=device,
        prefetch_batches=PREFETCH,
        pin_memory=device == "cuda",
        collate_fn=lambda batch: torch.full((values,), float(batch["id"][0])),
    )
    held: list[dict[str, int]] = []
    peaks: list[float] = []
    for _ in range(5):
        began_bytes = reset_peak(device)
        loop_s(batches, compute, device)
        peaks.append((peak_bytes(device) - began_bytes) / (4 * values))
        gc.collect()
        held.append(memory_of_process(device))
    # The batches that are prepared, that in use, the unfinished ones, and the one that is freed.
    measure("batches on the device", max(peaks), at_most=PREFETCH + 6)
    for name in held[0]:
        growth_bytes = held[-1][name] - held[0][name]
        measure(f"growth of {name} memory", growth_bytes / MIB, "MiB", at_most=32)


# --- computation ----------------------------------------------------------------------------------


def computation(duration_s: float, device: str) -> Compute:
    """Return a function that keeps the device busy for about that time, and reads the batch."""
    size = 2_048 if device == "cuda" else 64
    weights = torch.eye(size, device=device)
    total = torch.zeros((), device=device)

    product = torch.empty_like(weights)
    multiply = partial(torch.matmul, weights, weights, out=product)
    once_s = median(seconds_of(multiply, device) for _ in range(10))
    repetitions = math.ceil(duration_s / once_s)

    def compute(batch: torch.Tensor) -> None:
        for _ in range(repetitions):
            multiply()
        total.add_(batch[-1])

    return compute


def loop_s(batches: Iterable[torch.Tensor], compute: Compute, device: str) -> float:
    """Return the time of a loop from its second batch on."""
    rest = iter(batches)
    compute(next(rest))
    synchronize(device)
    began_s = time.perf_counter()
    for batch in rest:
        compute(batch)
    synchronize(device)
    return time.perf_counter() - began_s


def seconds_of(call: Callable[[], object], device: str) -> float:
    synchronize(device)
    began_s = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - began_s


def synchronize(device: str) -> None:
    scenarios.synchronize(torch.device(device))


# --- memory ---------------------------------------------------------------------------------------


def reset_peak(device: str) -> int:
    """Forget the largest use of the device's memory; return the present one in bytes."""
    if device != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def peak_bytes(device: str) -> int:
    return torch.cuda.max_memory_allocated() if device == "cuda" else 0


def memory_of_process(device: str) -> dict[str, int]:
    """Return the bytes that this process holds, by the kind of memory."""
    held = {"resident": scenarios.resident_bytes(os.getpid())}
    if device == "cuda":
        held["device"] = torch.cuda.memory_reserved()
        if hasattr(torch.cuda, "host_memory_stats"):  # not in torch 2.5
            held["pinned"] = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    return held
