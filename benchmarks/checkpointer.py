"""Checkpointer on CPUs: the blocking time of saves, and the duration of saves and restores.

Two or four ranks hold the same weights and Adam's state, half a gigabyte. One command per figure:

    checkpointer.py saves       blocking time, against a warm memcpy of the rank's state and
                                dcp.async_save; snapshot to commit, against puts by obstore alone
    checkpointer.py restores    restore(), against gets of the same objects by obstore alone
    checkpointer.py recoveries  SIGKILL of a worker to the next step: from memory, from the bucket
    checkpointer.py steps       steps per second with every="auto", against no saves
    checkpointer.py ray         blocking time, against Ray Train's report(ASYNC) with torch.save

Ratios are per pair; the claim is the lower end of the 95 % interval of their median.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import bucket, checkpointer_workload, peers, ratios

Readings = list[dict[str, float]]
_SAVES = 5
_PAUSE_S = 3.0
_SAME_NICENESS = {"RAY_worker_niceness": "0"}
"""Ray starts workers at niceness 15, which is unfair on a machine with other load."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A ratio of two readings per pair, larger is better, and its target."""

    title: str
    numerator: str
    denominator: str
    target: float
    pooled: bool = False
    """Use the sums over all pairs, for effects that occur in few pairs only."""

    def evaluate(self, readings: Readings) -> dict[str, Any]:
        """Evaluate the ratio; the denominator is the reading of spotfit."""
        if self.pooled:
            names = (self.numerator, self.denominator)
            readings = [{name: sum(one[name] for one in readings) for name in names}]
        verdict = ratios.verdict([one[self.numerator] / one[self.denominator] for one in readings])
        return {
            "title": self.title,
            "ours": median(one[self.denominator] for one in readings),
            "theirs": median(one[self.numerator] for one in readings),
            "ratio": verdict.median,
            "lower": verdict.lower,
            "target": self.target,
        }


CLAIMS: Mapping[str, tuple[Claim, ...]] = {
    "saves": (
        Claim("warm memcpy of the rank's state / our blocking time", "memcpy_s", "ours_s", 1 / 1.3),
        Claim("blocking time of dcp.async_save / ours", "dcp_s", "ours_s", 3.0),
        Claim("puts by obstore alone / our snapshot to commit", "raw_put_s", "commit_s", 0.8),
    ),
    "restores": (
        Claim(
            "gets by obstore alone, each object once / our restore()", "raw_get_s", "restore_s", 0.7
        ),
        Claim(
            "gets by obstore alone, each rank all objects / our restore()",
            "raw_each_s",
            "restore_s",
            0.7,
        ),
    ),
    "recoveries": (
        Claim("recovery from the bucket / from memory", "bucket_s", "memory_s", 5.0),
        Claim(
            "the same, until that step begins", "bucket_step_begins_s", "memory_step_begins_s", 5.0
        ),
        Claim("restore() alone", "bucket_restore_s", "memory_restore_s", 5.0),
    ),
    "steps": (
        Claim("steps per second with every='auto' / without", "never_s", "auto_s", 0.99),
        Claim("the same, all pairs together", "never_s", "auto_s", 0.99, pooled=True),
    ),
    "ray": (Claim("blocking time of Ray's report(ASYNC) / ours", "ray_s", "ours_s", 10.0),),
}


class BenchStorage:
    """Where runs are stored, for spotfit and for obstore alone."""

    def __init__(self, kind: str, folder: Path, gbit: float | None = None) -> None:
        self.folder = folder
        self.url = str(folder / "runs")
        self.config: dict[str, Any] = {
            "runs": self.url,
            "endpoint": None,
            "bucket": bucket.NAME,
            "dcp": str(folder / "dcp"),
            "events": str(folder / "events"),
        }
        if kind != "disk":
            server = bucket.server(encrypted=kind == "https")
            server.clear()
            if gbit is not None:
                server = bucket.with_bandwidth_limit(server, gbit)
            os.environ.update(server.environment)
            self.url = server.url
            self.config["endpoint"] = server.address


def fit(
    work: Callable[[dict[str, Any]], Any],
    storage: BenchStorage,
    args: argparse.Namespace,
    **more: Any,
) -> Any:
    """Run `work` on all ranks and return the value of rank 0."""
    import spotfit
    from spotfit.torch import TorchTrainer
    from spotfit_provisioners.local.options import LocalOptions

    sizes = {name: getattr(args, name) for name in ("ranks", "pairs", "layers", "width", "sharded")}
    config = {**storage.config, **sizes, **more}
    return (
        TorchTrainer(
            work,
            train_loop_config=config,
            scaling_config=spotfit.ScalingConfig(num_workers=args.ranks),
            run_config=spotfit.RunConfig(
                name="run",
                storage_path=storage.url,
                failure_config=spotfit.FailureConfig(max_failures=config.get("kills", 0)),
            ),
            provisioner=LocalOptions(root=str(storage.folder / "cloud"), nodes=1),
        )
        .fit()
        .return_value
    )


def saves(storage: BenchStorage, args: argparse.Namespace) -> Readings:
    readings: Readings = fit(checkpointer_workload.saves, storage, args)
    return readings


def restores(storage: BenchStorage, args: argparse.Namespace) -> Readings:
    fit(checkpointer_workload.save_once, storage, args)
    readings: Readings = fit(checkpointer_workload.restores, storage, args)
    return readings


def recoveries(storage: BenchStorage, args: argparse.Namespace) -> Readings:
    """Measure pairs of a recovery from memory and one from the bucket."""
    fit(checkpointer_workload.recover_repeatedly, storage, args, kills=2 * args.pairs)
    events = [json.loads(line) for line in Path(storage.config["events"]).read_text().splitlines()]
    killed_at = {event["attempt"]: event["at"] for event in events if event["event"] == "killed"}
    found: dict[str, list[dict[str, float]]] = {"memory": [], "bucket": []}
    for attempt, at in sorted(killed_at.items()):
        restarted = [
            one for one in events if one["event"] == "stepped" and one["attempt"] == attempt + 1
        ]
        assert len(restarted) == args.ranks, restarted
        source = "bucket" if attempt % 2 else "memory"
        assert {one["source"] for one in restarted} == {source}, restarted
        found[source].append(
            {f"{source}_{name}": took for name, took in _recovery_phases(restarted, at)}
        )
    return [memory | other for memory, other in zip(found["memory"], found["bucket"], strict=True)]


def _recovery_phases(
    restarted: Sequence[dict[str, Any]], killed_at: float
) -> Iterator[tuple[str, float]]:
    """Yield the duration of a recovery and of its phases, each until the last rank ends it."""
    yield "s", max(one["at"] for one in restarted) - killed_at
    before = killed_at
    for phase, moment in (("start", "started"), ("model", "built"), ("restore", "restored")):
        last = max(one[moment] for one in restarted)
        yield f"{phase}_s", last - before
        before = last
    yield "step_begins_s", before - killed_at
    yield "step_s", max(one["at"] for one in restarted) - before


def steps(storage: BenchStorage, args: argparse.Namespace) -> Readings:
    readings: Readings = fit(checkpointer_workload.steps, storage, args, steps=args.steps)
    return readings


def ray(storage: BenchStorage, args: argparse.Namespace) -> Readings:
    """Measure pairs of a spotfit run and a Ray run: the median blocking time of a few saves."""
    python = peers.python_of("ray")
    readings: Readings = []
    for pair in range(args.pairs):
        reading: dict[str, float] = {}
        for side in ("ours", "ray") if pair % 2 else ("ray", "ours"):
            if side == "ours":
                blocking_times = fit(
                    checkpointer_workload.blocking_times, storage, args, saves=_SAVES
                )
            else:
                blocking_times = _ray_blocking_times(str(python), storage, args)
            reading[f"{side}_s"] = median(blocking_times)
        readings.append(reading)
    return readings


def _ray_blocking_times(
    python: str, storage: BenchStorage, args: argparse.Namespace
) -> list[float]:
    events = storage.folder / "ray-blocking_times"
    config = {
        "ranks": args.ranks,
        "layers": args.layers,
        "saves": _SAVES,
        "pause_s": _PAUSE_S,
        "storage": tempfile.mkdtemp(dir=storage.folder),
        "events": str(events),
    }
    program = str(peers.SIDES / "ray_async_save.py")
    environment = peers.environment(peers.RAY) | _SAME_NICENESS
    subprocess.run([python, program, json.dumps(config)], env=environment, check=True)
    found: list[float] = json.loads(events.read_text())
    return found


FIGURES: Mapping[str, Callable[[BenchStorage, argparse.Namespace], Readings]] = {
    "saves": saves,
    "restores": restores,
    "recoveries": recoveries,
    "steps": steps,
    "ray": ray,
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("figure", choices=[*FIGURES])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--steps", type=int, default=100, help="steps per reading")
    parser.add_argument("--storage", choices=["disk", "s3", "https"], default="s3")
    parser.add_argument(
        "--layers", type=int, default=checkpointer_workload.LAYERS, help="12 MiB each"
    )
    parser.add_argument(
        "--width", type=int, default=checkpointer_workload.WIDTH, help="of each layer"
    )
    parser.add_argument("--sharded", action="store_true", help="shard the model by FSDP2")
    parser.add_argument("--gbit", type=float, help="limit the bandwidth of the bucket")
    parser.add_argument("--name", help="name of the result file")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    with tempfile.TemporaryDirectory(dir=os.environ.get("SPOTFIT_BENCH_TMP")) as name:
        storage = BenchStorage(args.storage, Path(name), args.gbit)
        readings = FIGURES[args.figure](storage, args)
    claims = [one.evaluate(readings) for one in CLAIMS[args.figure] if one.numerator in readings[0]]
    for claim in claims:
        answer = "yes" if claim["lower"] >= claim["target"] else "NO"
        print(
            f"{claim['title']}: {claim['ratio']:.2f} "
            f"(lower bound {claim['lower']:.2f}, target {claim['target']:.2f}: {answer})"
        )
    medians = {name: round(median(one[name] for one in readings), 4) for name in readings[0]}
    settings = {name: value for name, value in vars(args).items() if name != "figure"}
    print(json.dumps({**settings, "medians": medians}))
    result = {**settings, "title": _title(args), "readings": readings, "claims": claims}
    (peers.BENCH / "results").mkdir(parents=True, exist_ok=True)
    (peers.BENCH / "results" / f"{_name(args)}.json").write_text(json.dumps(result))


def _title(args: argparse.Namespace) -> str:
    size_mib = args.layers * 3 * args.width**2 * 4 // 2**20
    parts = [f"{args.ranks} ranks", f"{size_mib} MiB", args.storage]
    parts += ["sharded"] * args.sharded + [f"{args.gbit} Gbit/s"] * (args.gbit is not None)
    return f"Checkpointer, {', '.join(parts)}"


def _name(args: argparse.Namespace) -> str:
    """Return the name of the result file."""
    if args.name:
        return str(args.name)
    wire = "" if args.gbit is None else f"_{args.gbit}gbit"
    kind = f"{args.storage}{wire}{'_sharded' if args.sharded else ''}"
    return f"checkpointer_{args.figure}_{kind}_{args.ranks}_{args.layers}"


if __name__ == "__main__":
    main()
