"""Training functions of the GPU tests. Each also runs on a CPU, where a GPU is not requested."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import spotfit
from spotfit.torch import (
    Checkpointer,
    enable_reproducibility,
    get_device,
    prepare_data_loader,
    prepare_model,
)
from spotfit.torch.checkpoint.tensor_arena import TensorArena
from tests.gpu.records import (
    Config,
    agent_pid,
    die_once,
    parent_process,
    record,
    wait_for_uploads,
)

SHARED_MEMORY = "/dev/shm"  # noqa: S108 - its size is read
EPOCHS = 2
SAMPLES, BATCH = 96, 8
"""Twelve steps per epoch with one worker, six with two."""
SAVE_EVERY = 3


def train(config: Config) -> dict[str, Any]:
    """Train with dropout, die once at each step of `kill_at`; return a digest of the state.

    Each start of a worker is recorded in `starts.jsonl`, each step in `steps.jsonl`.
    """
    rank = spotfit.get_context().get_world_rank()
    device = get_device()
    enable_reproducibility(config["seed"])
    model = prepare_model(a_model(), parallel_strategy=config.get("strategy", "ddp"))
    torch.manual_seed(config["seed"] + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = prepare_data_loader(DataLoader(some_data(), batch_size=BATCH, shuffle=True))
    every = config.get("every", SAVE_EVERY)
    ckpt = Checkpointer(model=model, optimizer=optimizer, loader=loader, every=every)
    began = time.time()
    restored = ckpt.restore()
    record(
        config,
        "starts",
        rank=rank,
        step=ckpt.steps,
        source=restored.source if restored else "",
        restore_s=time.time() - began,
        **memory_in_use(device),
        **parent_process(),
    )
    for epoch in range(restored.epoch if restored else 0, EPOCHS):
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)
        for inputs, labels in loader:
            loss = nn.functional.mse_loss(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            average = loss.detach()
            dist.all_reduce(average)  # with one worker DDP has no collectives
            ckpt.step({"loss": average.item()})
            record(config, "steps", rank=rank, step=ckpt.steps, at=time.time())
            die_once(config, rank, ckpt.steps)
    return {
        "digest": digest(state_tensors(model, optimizer)),
        "devices": sorted({str(tensor.device) for tensor in model.parameters()}),
        "backend": dist.get_backend(),
        "world_size": dist.get_world_size(),
    }


def a_model() -> nn.Module:
    """A small network with a convolution, whose backward pass is not deterministic by default."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 8, 3, padding=1),
        nn.GELU(),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(512, 64),
        nn.Linear(64, 1),
    )


def some_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.rand(SAMPLES, 64, generator=generator)
    return TensorDataset(inputs, inputs.mean(1, keepdim=True))


def save_often(config: Config) -> dict[str, Any]:
    """Measure how long saves block, and a copy of as many bytes to pinned memory."""
    device = get_device()
    torch.manual_seed(0)
    layers = [
        nn.Linear(config["width"], config["width"], bias=False) for _ in range(config["layers"])
    ]
    model = prepare_model(nn.Sequential(*layers), parallel_strategy=config["strategy"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    inputs = torch.rand(8, config["width"], device=device)
    ckpt = Checkpointer(model=model, optimizer=optimizer, every="10m", save_at_end=False)
    ckpt.restore()
    save_s: list[float] = []
    copy_s: list[float] = []
    target: list[torch.Tensor] = []
    for round_ in range(config["rounds"] + 1):
        optimizer.zero_grad()
        model(inputs).square().sum().backward()
        optimizer.step()
        ckpt.step()
        if round_ == 0:  # the optimizer has created its state
            target = pinned_copies(state_tensors(model, optimizer))
        copy_s.append(seconds_to_copy(state_tensors(model, optimizer), target, device))
        synchronize(device)
        began = time.perf_counter()
        ckpt.save()
        save_s.append(time.perf_counter() - began)
        wait_for_uploads(ckpt)
    arenas = [slot.arena for slot in ckpt._slots]
    is_pinned = all(isinstance(one, TensorArena) and one._unpin is not None for one in arenas)
    return {
        "save_s": median(save_s[1:]),  # the first allocates memory
        "copy_s": median(copy_s[1:]),
        "bytes": sum(one.nbytes for one in target),
        "is_pinned": is_pinned,
    }


def pinned_copies(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return memory for copies of the tensors, pinned if they are on a GPU."""
    return [torch.empty(one.shape, dtype=one.dtype, pin_memory=one.is_cuda) for one in tensors]


def seconds_to_copy(
    tensors: list[torch.Tensor], target: list[torch.Tensor], device: torch.device
) -> float:
    synchronize(device)
    began = time.perf_counter()
    for source, copy in zip(tensors, target, strict=True):
        copy.copy_(source, non_blocking=True)
    synchronize(device)
    return time.perf_counter() - began


def share_a_device(config: Config) -> dict[str, Any]:
    """Average the gradients of all workers; return where that happened and the weights' digest."""
    torch.manual_seed(0)
    rank = spotfit.get_context().get_world_rank()
    model = prepare_model(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(rank)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.rand(4, 8, device=get_device())).sum().backward()
        optimizer.step()
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, digest([one.detach() for one in model.parameters()]))
    devices: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(devices, physical_device(get_device()))
    return {"backend": dist.get_backend(), "digests": digests, "devices": devices}


def read_shard(config: Config) -> dict[str, Any]:
    """Read a shard of row numbers; return those of all ranks and the batches with wrong values.

    Each batch is read at once and after a computation, when the loop has dropped it: the copy must
    be complete, and its memory must not be reused before.
    """
    device = get_device()
    columns = config["columns"]

    def repeat(batch: dict[str, Any]) -> dict[str, torch.Tensor]:
        rows = torch.as_tensor(batch["id"], dtype=torch.float32)
        return {"row": rows, "values": rows[:, None].expand(-1, columns).contiguous()}

    batches = spotfit.get_dataset_shard("train").iter_torch_batches(
        batch_size=50, prefetch_batches=3, collate_fn=repeat, pin_memory=device.type == "cuda"
    )
    weights = torch.eye(2_000 if device.type == "cuda" else 8, device=device)
    rows: list[torch.Tensor] = []
    is_wrong: list[torch.Tensor] = []
    for batch in batches:
        rows.append(batch["row"].clone())
        is_wrong.append((batch["values"] != rows[-1][:, None]).any())
        for _ in range(20):
            weights = weights @ weights
        is_wrong.append((batch["values"] != rows[-1][:, None]).any())
    found = (torch.cat(rows).long().tolist(), int(torch.stack(is_wrong).sum()), str(device))
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, found)
    return {
        "rows": [row for rows, _, _ in ranks for row in rows],
        "wrong_batches": sum(wrong for _, wrong, _ in ranks),
        "devices": [name for _, _, name in ranks],
    }


def physical_device(device: torch.device) -> str:
    """Return a name of the device that is the same in all processes of the machine."""
    if device.type != "cuda":
        return "cpu"
    properties = torch.cuda.get_device_properties(device)
    return str(getattr(properties, "uuid", f"{properties.name} {device}"))  # torch 2.5


# --- readings -------------------------------------------------------------------------------------


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def state_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return this rank's part of all weights and of the optimizer's state, in a fixed order."""
    states = [
        value
        for weight in model.parameters()
        # Sorted: a restored state may have its entries in another order.
        for value in (weight, *(value for _, value in sorted(optimizer.state[weight].items())))
        if isinstance(value, torch.Tensor)
    ]
    return [getattr(one, "_local_tensor", one).detach() for one in states]


def digest(tensors: Iterable[torch.Tensor]) -> str:
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def memory_in_use(device: torch.device) -> dict[str, int]:
    """Return the bytes in use on the whole device, in /dev/shm and by the node's agent."""
    device_bytes = 0
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        device_bytes = total - free
    shm = os.statvfs(SHARED_MEMORY)
    return {
        "device_bytes": device_bytes,
        "shm_bytes": (shm.f_blocks - shm.f_bfree) * shm.f_frsize,
        "agent_bytes": resident_bytes(agent_pid()),
    }


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
