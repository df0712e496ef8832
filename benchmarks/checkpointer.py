"""Checkpointer on CPUs: how long the loop stands still, and how fast a state is saved and restored.

Two or four ranks hold the same weights and Adam's state, half a gigabyte. In the same workers:

- one warm memcpy of the rank's state, the least a snapshot of all of it can cost
- Checkpointer, and `dcp.async_save` of torch: how long each call takes
- from the snapshot to the commit, against obstore alone putting the same bytes there
- `restore()`, against obstore alone fetching the same bytes
- steps with `every="auto"`, against steps without any checkpoint

Ratios are per pair; the claim is the lower end of the 95 % interval of their median.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import bucket, peers, ratios

LAYERS = 43
WIDTH = 1024
"""43 layers of 1024 by 1024 floats: 172 MiB of weights, with Adam's two averages 516 MiB."""
AT_ONCE = 8
BARS = {
    "stall_to_memcpy": 1 / 1.3,
    "stall_to_dcp": 3.0,
    "commit": 0.8,
    "restore": 0.7,
    "steps": 0.99,
}
TITLES = {
    "stall_to_memcpy": "one warm memcpy of the rank's state / the loop's standstill",
    "stall_to_part": "one warm memcpy of what the rank writes / the loop's standstill",
    "stall_to_dcp": "standstill of dcp.async_save / ours",
    "commit": "bytes a second from the snapshot to the commit / obstore alone",
    "restore": "bytes a second of restore() / obstore alone",
    "steps": "steps a second with every='auto' / without a Checkpointer",
}


def work(config: dict[str, Any]) -> Any:
    """What each rank does; rank 0's readings come back."""
    import torch
    import torch.distributed as dist

    import spotfit
    from spotfit.torch import Checkpointer, prepare_model

    rank = spotfit.get_context().get_world_rank()
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    model = prepare_model(torch.nn.Sequential(*layers))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    inputs = torch.rand(8, WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    step()
    ckpt = Checkpointer(model=model, optimizer=optimizer, every="at_notice")
    readings: list[dict[str, float]] = []
    if config["restores"]:
        for _ in range(config["pairs"]):
            dist.barrier()
            began = time.perf_counter()
            restored = ckpt.restore()
            dist.barrier()
            readings.append({"restore_s": time.perf_counter() - began})
            assert restored is not None
        return readings
    desk, slots = ckpt._desk, ckpt._slots  # noqa: SLF001 - to see when it is committed
    tensors = [*model.parameters()]
    tensors += [part for state in optimizer.state.values() for part in state.values()]
    mine = [tensor.detach() for tensor in tensors]
    copies = [tensor.clone() for tensor in mine]
    checkpoints = config["dcp"]
    for pair in range(config["pairs"] + 2):
        reading: dict[str, float] = {}
        for side in ("memcpy", "ours", "dcp") if pair % 2 else ("dcp", "ours", "memcpy"):
            step()
            dist.barrier()
            began = time.perf_counter()
            if side == "memcpy":
                for copy, tensor in zip(copies, mine, strict=True):
                    copy.copy_(tensor)
                reading["memcpy_s"] = time.perf_counter() - began
            elif side == "ours":
                ckpt.save({"pair": pair})
                reading["ours_s"] = time.perf_counter() - began
                latest = max(slot.report or 0 for slot in slots)
                while desk.fate(latest) not in ("committed", "lost"):
                    time.sleep(0.005)
                reading["commit_s"] = time.perf_counter() - began
                slot = next(one for one in slots if one.report == latest)
                reading["mine_bytes"] = slot.arena.size_bytes
            else:
                saved = _dcp(model, optimizer, Path(checkpoints, str(pair)))
                reading["dcp_s"] = time.perf_counter() - began
                saved.result()
        if pair >= 2:  # the first ones allocate
            readings.append(reading)
    for every in ("never", "auto", "auto", "never") * config["loops"]:
        loop = (
            None
            if every == "never"
            else Checkpointer(model=model, optimizer=optimizer, every="auto")
        )
        dist.barrier()
        began = time.perf_counter()
        for _ in range(config["steps"]):
            step()
            if loop is not None:
                loop.step()
        dist.barrier()
        readings.append({every: config["steps"] / (time.perf_counter() - began)})
    return readings


def _dcp(model: Any, optimizer: Any, path: Path) -> Any:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, state = get_state_dict(model, optimizer)
    return dcp.async_save(  # type: ignore[attr-defined]  # exported in fact
        {"model": weights, "optimizer": state}, checkpoint_id=str(path)
    )


def raw(store: Any, ranks: int, bytes_each: int) -> tuple[float, float]:
    """Seconds in which obstore alone puts and fetches as much, as many at once as we do."""
    chunk = 4 * 2**20
    names = [f"raw/{rank}-{n}" for rank in range(ranks) for n in range(-(-bytes_each // chunk))]
    body = os.urandom(chunk)
    with ThreadPoolExecutor(4 * ranks) as pool:
        began = time.perf_counter()
        list(pool.map(lambda name: store.put(name, body), names))
        put_s = time.perf_counter() - began
    with ThreadPoolExecutor(AT_ONCE * ranks) as pool:
        began = time.perf_counter()
        list(pool.map(lambda name: len(store.get(name).bytes()), names))
        return put_s, time.perf_counter() - began


def stores(kind: str, folder: Path) -> tuple[str, Any]:
    """Our storage path, and obstore's own store at the same place."""
    if kind == "disk":
        from obstore.store import LocalStore

        (folder / "raw").mkdir()
        return str(folder / "runs"), LocalStore(str(folder / "raw"))
    from obstore.store import S3Store

    server = bucket.server()
    server.empty()
    os.environ.update(server.environment)
    return server.url, S3Store(
        bucket.NAME,
        endpoint=server.address,
        region="us-east-1",
        client_options={"allow_http": True},
    )


def fit(storage: str, workers: int, config: dict[str, Any], folder: Path) -> Any:
    """What rank 0 read."""
    import spotfit
    from spotfit.torch import TorchTrainer
    from spotfit_localsim.live.options import LocalOptions

    return (
        TorchTrainer(
            work,
            train_loop_config=config,
            scaling_config=spotfit.ScalingConfig(num_workers=workers),
            run_config=spotfit.RunConfig(name="run", storage_path=storage),
            provisioner=LocalOptions(root=str(folder / "cloud"), nodes=1),
        )
        .fit()
        .return_value
    )


def paired(readings: list[dict[str, float]], store: Any, workers: int) -> dict[str, list[float]]:
    """The ratios, better when bigger."""
    saves = [one for one in readings if "ours_s" in one]
    found: dict[str, list[float]] = {name: [] for name in TITLES}
    for one in saves:
        found["stall_to_memcpy"].append(one["memcpy_s"] / one["ours_s"])
        found["stall_to_part"].append(one["memcpy_s"] / workers / one["ours_s"])
        found["stall_to_dcp"].append(one["dcp_s"] / one["ours_s"])
        put_s, _ = raw(store, workers, int(one["mine_bytes"]))
        found["commit"].append(put_s / one["commit_s"])
    for one in (one for one in readings if "restore_s" in one):
        # Each rank needs all of it.
        _, get_s = raw(store, workers, int(saves[0]["mine_bytes"] * workers))
        found["restore"].append(get_s / one["restore_s"])
    auto = [one["auto"] for one in readings if "auto" in one]
    never = [one["never"] for one in readings if "never" in one]
    found["steps"] = [ours / theirs for ours, theirs in zip(auto, never, strict=True)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--loops", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--storage", choices=["disk", "s3"], default="disk")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=os.environ.get("SPOTFIT_BENCH_TMP")) as name:
        folder = Path(name)
        storage, store = stores(asked.storage, folder)
        config = {
            "pairs": asked.pairs,
            "loops": asked.loops,
            "steps": asked.steps,
            "dcp": str(folder / "dcp"),
            "restores": False,
        }
        readings = fit(storage, asked.ranks, config, folder)
        readings += fit(storage, asked.ranks, config | {"restores": True}, folder)
        found = paired(readings, store, asked.ranks)
    seconds = {
        name: median(one[name] for one in readings if name in one)
        for name in ("memcpy_s", "ours_s", "dcp_s", "commit_s", "restore_s")
    }
    for name, title in TITLES.items():
        if not found[name]:
            continue
        verdict = ratios.verdict(found[name])
        bar = BARS.get(name)
        told = "" if bar is None else f", asked {bar:.2f}: {'yes' if verdict.clears(bar) else 'NO'}"
        print(f"{title}: {verdict.median:.2f} (at least {verdict.lower:.2f}{told})")
    print(json.dumps({"ranks": asked.ranks, "storage": asked.storage, "medians": seconds}))
    (peers.BENCH / "results").mkdir(parents=True, exist_ok=True)
    kept = peers.BENCH / "results" / f"checkpointer_{asked.storage}_{asked.ranks}.json"
    kept.write_text(json.dumps({"readings": readings, "ratios": found}))


if __name__ == "__main__":
    main()
