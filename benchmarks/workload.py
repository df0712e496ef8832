"""The training work, identical on every side.

Heavy modules are imported inside functions, and spotfit nowhere: a function gets `report`,
`get_checkpoint` and `get_context` from the module of its side. Events are appended to the file in
the configuration, with the machine's wall clock.
"""

import importlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

Config = Mapping[str, Any]

API = {"ours": "spotfit", "ray": "ray.train", "torchrun": "benchmarks.sides.plain"}
STEPS_PER_ATTEMPT = 4
SAVED_AFTER = 1
STEPS_BEFORE_KILL = 3
WIDTH = 256
_CHUNK_BYTES = 1 << 20


def record(config: Config, event: str, **fields: Any) -> None:
    """Append one event; appends of short lines by several processes are atomic."""
    line = json.dumps({"event": event, "at": time.time(), "fit": config.get("fit", 0)} | fields)
    with Path(config["events"]).open("a") as file:
        file.write(line + "\n")


def find(name: str) -> Any:
    """Return a training function: of this module, or `module.function` of another benchmark."""
    module, _, function = name.rpartition(".")
    return getattr(importlib.import_module(f"benchmarks.{module or 'workload'}"), function)


# ── training functions ────────────────────────────────────────────────────────────────────────────


def first_line(config: Config) -> None:
    """Record the start of the function, then execute one step."""
    entered = time.time()
    rank = rank_of(config)
    record(config, "first_line", rank=rank, entered=entered, **framework_state())
    for _ in _steps(1):
        record(config, "first_step", rank=rank)


def survive(config: Config) -> None:
    """Train in attempts of a few steps; in each but the last, a worker or a node is killed."""
    entered = time.time()
    api, rank, attempt = api_of(config), rank_of(config), kill_count(config)
    step = _step_of(api.get_checkpoint())
    for nth, _ in enumerate(_steps(STEPS_PER_ATTEMPT)):
        if nth == 0:
            record(config, "attempt_started", rank=rank, attempt=attempt, step=step)
        step += 1
        if nth == SAVED_AFTER:
            _save(api, rank, step)
        if nth == STEPS_BEFORE_KILL - 1 and attempt < config["kills"]:
            time.sleep(max(0.0, entered + config.get("kill_after_s", 0.0) - time.time()))
            {"worker": kill_worker, "node": _kill_node}[config["victim"]](config, attempt)


def report_often(config: Config) -> None:
    """Call `report` repeatedly and record the duration of the calls."""
    import torch.distributed as dist

    api = api_of(config)
    for step in range(config["unmeasured"]):
        api.report({"loss": 0.5, "step": step})
    dist.barrier()
    since = time.time()
    took = list(_reports(api, config["calls"]))
    record(config, "reported", rank=rank_of(config), since=since, **_spread_us(took))


def upload(config: Config) -> None:
    """Report checkpoints of several files, and record the duration of each call."""
    api = api_of(config)
    for n in range(config["reports"]):
        with tempfile.TemporaryDirectory() as folder:
            _fill(Path(folder), config["files"], config["bytes_each"])
            since = time.perf_counter()
            api.report({"n": n}, checkpoint=api.Checkpoint.from_directory(folder))
            record(config, "uploaded", took_s=time.perf_counter() - since)


def _fill(folder: Path, files: int, bytes_each: int) -> None:
    """Write random files, so that no side profits from deduplication or caches."""
    for n in range(files):
        with (folder / f"part-{n:05d}").open("wb") as file:
            for _ in range(0, bytes_each, _CHUNK_BYTES):
                file.write(os.urandom(min(bytes_each, _CHUNK_BYTES)))


def loop(config: Config) -> None:
    """Execute many steps of a small DDP model and record their duration."""
    since = 0.0
    for nth, _ in enumerate(_steps(config["unmeasured"] + config["steps"])):
        if nth == config["unmeasured"] - 1:
            since = time.time()
    record(config, "looped", rank=rank_of(config), since=since, steps=config["steps"])


# ── helpers ───────────────────────────────────────────────────────────────────────────────────────


def api_of(config: Config, module: str = "") -> Any:
    """Return the module of the side, or one below it, such as "lightning"."""
    return importlib.import_module(API[config["side"]] + module)


def rank_of(config: Config) -> int:
    return int(api_of(config).get_context().get_world_rank())


def framework_state() -> dict[str, bool]:
    """Return whether torch is imported and the process group is formed."""
    torch_is_imported = "torch" in sys.modules
    if not torch_is_imported:
        return {"torch": False, "group": False}
    import torch.distributed as dist

    return {"torch": True, "group": dist.is_initialized()}


def _steps(count: int) -> Iterator[None]:
    """Train a small DDP model; yield after each step."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.randn(16, WIDTH)
    for _ in range(count):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        yield


def _reports(api: Any, calls: int) -> Iterator[float]:
    for step in range(calls):
        began = time.perf_counter()
        api.report({"loss": 0.5, "step": step})
        yield time.perf_counter() - began


def _spread_us(took: list[float]) -> dict[str, float]:
    return {
        "median_us": median(took) * 1e6,
        "mean_us": mean(took) * 1e6,
        "p99_us": quantiles(took, n=100, method="inclusive")[98] * 1e6,
        "calls": len(took),
    }


def _save(api: Any, rank: int, step: int) -> None:
    """Save with the API of the side: rank 0 writes, all ranks report."""
    if rank != 0:
        api.report({"step": step})
        return
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "state.json").write_text(json.dumps({"step": step}))
        api.report({"step": step}, checkpoint=api.Checkpoint.from_directory(folder))


def _step_of(checkpoint: Any) -> int:
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as folder:
        return int(json.loads((Path(folder) / "state.json").read_text())["step"])


# ── recoveries ────────────────────────────────────────────────────────────────────────────────────


def kill_count(config: Config) -> int:
    return len(list(Path(config["kill_markers"]).glob("kill-*")))


def kill_worker(config: Config, attempt: int) -> None:
    """Kill each rank in turn, including rank 0."""
    workers = int(api_of(config).get_context().get_world_size())
    if rank_of(config) == (attempt + 1) % workers:
        _record_kill(config, attempt)
        os.kill(os.getpid(), signal.SIGKILL)


def _kill_node(config: Config, attempt: int) -> None:
    """Kill all processes of the second node, its agent first."""
    context = api_of(config).get_context()
    if context.get_node_rank() == 1 and context.get_local_rank() == 0:
        others = [pid for pid in _session(os.getsid(0)) if pid != os.getpid()]
        _record_kill(config, attempt)
        for pid in [*others, os.getpid()]:
            os.kill(pid, signal.SIGKILL)


def _record_kill(config: Config, attempt: int) -> None:
    """Record the kill directly before it happens."""
    (Path(config["kill_markers"]) / f"kill-{attempt}").touch()
    record(config, "killed", attempt=attempt, rank=rank_of(config))


def _session(leader: int) -> list[int]:
    """Return the processes of a session; the first is the session leader."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
    return sorted((pid for pid in pids if _session_of(pid) == leader), key=lambda p: p != leader)


def _session_of(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0
