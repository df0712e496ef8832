"""Checkpointer on CPUs: how long the loop stands still, and how fast a state is saved and restored.

Two or four ranks hold the same weights and Adam's state, half a gigabyte. A command a figure:

    checkpointer.py saves      the standstill, against one warm memcpy of the rank's state and
                               dcp.async_save; snapshot to commit, against obstore alone putting
    checkpointer.py restores   restore(), against obstore alone fetching the same from the bucket
    checkpointer.py deaths     SIGKILL of a worker to the next step: from memory, from the bucket
    checkpointer.py steps      steps a second with every="auto", against none
    checkpointer.py ray        the standstill, against Ray Train's report(ASYNC) with torch.save

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

from benchmarks import bucket, checkpointed, peers, ratios

Readings = list[dict[str, float]]
_SAVES = 5
_PAUSE_S = 3.0
_NOT_NICER_THAN_OURS = {"RAY_worker_niceness": "0"}
"""Ray has its workers step back behind all others (15): unfair where there are any."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A ratio of two readings of each pair, better when bigger; and what was asked."""

    title: str
    over: str
    under: str
    asked: float
    pooled: bool = False
    """Whether what counts is all pairs together: what is looked for happens in few of them."""

    def judged(self, readings: Readings) -> dict[str, Any]:
        """What the pairs say: ours is what stands under the line."""
        if self.pooled:
            names = (self.over, self.under)
            readings = [{name: sum(one[name] for one in readings) for name in names}]
        verdict = ratios.verdict([one[self.over] / one[self.under] for one in readings])
        return {
            "words": self.title,
            "ours": median(one[self.under] for one in readings),
            "theirs": median(one[self.over] for one in readings),
            "ratio": verdict.median,
            "lower": verdict.lower,
            "asked": self.asked,
        }


CLAIMS: Mapping[str, tuple[Claim, ...]] = {
    "saves": (
        Claim("a warm memcpy of the rank's state / our standstill", "memcpy_s", "ours_s", 1 / 1.3),
        Claim("standstill of dcp.async_save / ours", "dcp_s", "ours_s", 3.0),
        Claim("obstore alone putting / our snapshot to commit", "raw_put_s", "commit_s", 0.8),
    ),
    "restores": (
        Claim("obstore alone fetching it once / our restore()", "raw_get_s", "restore_s", 0.7),
        Claim("obstore alone, each rank all / our restore()", "raw_each_s", "restore_s", 0.7),
    ),
    "deaths": (
        Claim("recovery from the bucket / from memory", "bucket_s", "memory_s", 5.0),
        Claim("the same, until that step begins", "bucket_going_s", "memory_going_s", 5.0),
        Claim("of it restore() alone", "bucket_restore_s", "memory_restore_s", 5.0),
    ),
    "steps": (
        Claim("steps a second with every='auto' / without", "never_s", "auto_s", 0.99),
        Claim("the same, all pairs together", "never_s", "auto_s", 0.99, pooled=True),
    ),
    "ray": (Claim("standstill of Ray's report(ASYNC) / ours", "ray_s", "ours_s", 10.0),),
}


class Place:
    """Where runs are stored, for ours and for obstore alone."""

    def __init__(self, kind: str, folder: Path, gbit: float | None = None) -> None:
        self.folder = folder
        self.url = str(folder / "runs")
        self.config: dict[str, Any] = {
            "runs": self.url,
            "endpoint": None,
            "bucket": bucket.NAME,
            "dcp": str(folder / "dcp"),
            "notes": str(folder / "notes"),
        }
        if kind != "disk":
            server = bucket.server(encrypted=kind == "https")
            server.empty()
            if gbit is not None:
                server = bucket.narrowed(server, gbit)
            os.environ.update(server.environment)
            self.url = server.url
            self.config["endpoint"] = server.address


def fit(
    work: Callable[[dict[str, Any]], Any], place: Place, asked: argparse.Namespace, **more: Any
) -> Any:
    """What rank 0 returned."""
    import spotfit
    from spotfit.torch import TorchTrainer
    from spotfit_provisioners.local.options import LocalOptions

    sizes = {
        name: getattr(asked, name) for name in ("ranks", "pairs", "layers", "width", "sharded")
    }
    config = {**place.config, **sizes, **more}
    return (
        TorchTrainer(
            work,
            train_loop_config=config,
            scaling_config=spotfit.ScalingConfig(num_workers=asked.ranks),
            run_config=spotfit.RunConfig(
                name="run",
                storage_path=place.url,
                failure_config=spotfit.FailureConfig(max_failures=config.get("kills", 0)),
            ),
            provisioner=LocalOptions(root=str(place.folder / "cloud"), nodes=1),
        )
        .fit()
        .return_value
    )


def saves(place: Place, asked: argparse.Namespace) -> Readings:
    readings: Readings = fit(checkpointed.saves, place, asked)
    return readings


def restores(place: Place, asked: argparse.Namespace) -> Readings:
    fit(checkpointed.one_save, place, asked)
    readings: Readings = fit(checkpointed.restores, place, asked)
    return readings


def deaths(place: Place, asked: argparse.Namespace) -> Readings:
    """Each pair is a death that leaves memory behind, and one that does not."""
    fit(checkpointed.killed, place, asked, kills=2 * asked.pairs)
    notes = [json.loads(line) for line in Path(place.config["notes"]).read_text().splitlines()]
    died_at = {note["life"]: note["at"] for note in notes if note["what"] == "killed"}
    found: dict[str, list[dict[str, float]]] = {"memory": [], "bucket": []}
    for life, at in sorted(died_at.items()):
        again = [one for one in notes if one["what"] == "stepped" and one["life"] == life + 1]
        assert len(again) == asked.ranks, again
        source = "bucket" if life % 2 else "memory"
        assert {one["source"] for one in again} == {source}, again
        found[source].append({f"{source}_{name}": took for name, took in _phases(again, at)})
    return [memory | other for memory, other in zip(found["memory"], found["bucket"], strict=True)]


def _phases(again: Sequence[dict[str, Any]], died_at: float) -> Iterator[tuple[str, float]]:
    """How long the whole recovery took, and each part of it until the last rank was through."""
    yield "s", max(one["at"] for one in again) - died_at
    before = died_at
    for phase, moment in (("begin", "begun"), ("model", "built"), ("restore", "restored")):
        last = max(one[moment] for one in again)
        yield f"{phase}_s", last - before
        before = last
    yield "going_s", before - died_at
    yield "step_s", max(one["at"] for one in again) - before


def steps(place: Place, asked: argparse.Namespace) -> Readings:
    readings: Readings = fit(checkpointed.steps, place, asked, steps=asked.steps)
    return readings


def ray(place: Place, asked: argparse.Namespace) -> Readings:
    """Each pair is a run of ours and one of Ray's, with the median standstill of a few saves."""
    python = peers.python_of("ray")
    readings: Readings = []
    for pair in range(asked.pairs):
        reading: dict[str, float] = {}
        for side in ("ours", "ray") if pair % 2 else ("ray", "ours"):
            if side == "ours":
                stalls = fit(checkpointed.stalls, place, asked, saves=_SAVES)
            else:
                stalls = _stalls_of_ray(str(python), place, asked)
            reading[f"{side}_s"] = median(stalls)
        readings.append(reading)
    return readings


def _stalls_of_ray(python: str, place: Place, asked: argparse.Namespace) -> list[float]:
    notes = place.folder / "ray-stalls"
    config = {
        "ranks": asked.ranks,
        "layers": asked.layers,
        "saves": _SAVES,
        "pause_s": _PAUSE_S,
        "storage": tempfile.mkdtemp(dir=place.folder),
        "notes": str(notes),
    }
    program = str(peers.SIDES / "ray_async_save.py")
    environment = peers.environment(peers.RAY) | _NOT_NICER_THAN_OURS
    subprocess.run([python, program, json.dumps(config)], env=environment, check=True)
    found: list[float] = json.loads(notes.read_text())
    return found


FIGURES: Mapping[str, Callable[[Place, argparse.Namespace], Readings]] = {
    "saves": saves,
    "restores": restores,
    "deaths": deaths,
    "steps": steps,
    "ray": ray,
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("figure", choices=[*FIGURES])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--steps", type=int, default=100, help="between two looks at the clock")
    parser.add_argument("--storage", choices=["disk", "s3", "https"], default="s3")
    parser.add_argument("--layers", type=int, default=checkpointed.LAYERS, help="12 MiB each")
    parser.add_argument("--width", type=int, default=checkpointed.WIDTH, help="of each layer")
    parser.add_argument("--sharded", action="store_true", help="by FSDP2, each rank its part")
    parser.add_argument("--gbit", type=float, help="that a machine gets from the bucket a second")
    parser.add_argument("--name", help="of the file with the result")
    return parser.parse_args()


def main() -> None:
    asked = arguments()
    with tempfile.TemporaryDirectory(dir=os.environ.get("SPOTFIT_BENCH_TMP")) as name:
        place = Place(asked.storage, Path(name), asked.gbit)
        readings = FIGURES[asked.figure](place, asked)
    claims = [one.judged(readings) for one in CLAIMS[asked.figure] if one.over in readings[0]]
    for claim in claims:
        answer = "yes" if claim["lower"] >= claim["asked"] else "NO"
        print(
            f"{claim['words']}: {claim['ratio']:.2f} "
            f"(at least {claim['lower']:.2f}, asked {claim['asked']:.2f}: {answer})"
        )
    medians = {name: round(median(one[name] for one in readings), 4) for name in readings[0]}
    how = {name: told for name, told in vars(asked).items() if name != "figure"}
    print(json.dumps({**how, "medians": medians}))
    kept = {**how, "title": _title(asked), "readings": readings, "claims": claims}
    (peers.BENCH / "results").mkdir(parents=True, exist_ok=True)
    (peers.BENCH / "results" / f"{_name(asked)}.json").write_text(json.dumps(kept))


def _title(asked: argparse.Namespace) -> str:
    size_mib = asked.layers * 3 * asked.width**2 * 4 // 2**20
    how = [f"{asked.ranks} ranks", f"{size_mib} MiB", asked.storage]
    how += ["sharded"] * asked.sharded + [f"{asked.gbit} Gbit/s"] * (asked.gbit is not None)
    return f"Checkpointer, {', '.join(how)}"


def _name(asked: argparse.Namespace) -> str:
    """Under which it is kept."""
    if asked.name:
        return str(asked.name)
    wire = "" if asked.gbit is None else f"_{asked.gbit}gbit"
    kind = f"{asked.storage}{wire}{'_sharded' if asked.sharded else ''}"
    return f"checkpointer_{asked.figure}_{kind}_{asked.ranks}_{asked.layers}"


if __name__ == "__main__":
    main()
