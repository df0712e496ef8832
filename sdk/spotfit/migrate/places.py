"""Where the names of Ray Train live here, and what to do about those that stay with Ray."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from spotfit.host.env import SETTINGS
from spotfit.host.theirs import WITHOUT_EFFECT

Path = tuple[str, ...]
"""A dotted name, part by part."""

ROOT: Path = ("ray",)

FACADES: Mapping[Path, str] = {
    ("ray", "air"): "spotfit",
    ("ray", "air", "session"): "spotfit",
    ("ray", "train"): "spotfit",
    ("ray", "train", "backend"): "spotfit.backend",
    ("ray", "train", "collective"): "spotfit.collective",
    ("ray", "train", "torch"): "spotfit.torch",
    ("ray", "train", "torch", "xla"): "spotfit.torch.xla",
    ("ray", "train", "v2", "api"): "spotfit",
    ("ray", "train", "v2", "torch"): "spotfit.torch",
}
"""Modules of Ray that hold public names, and ours that hold the same."""

ASKED_OF_THE_CONTEXT = frozenset(
    [
        "get_experiment_name",
        "get_local_rank",
        "get_local_world_size",
        "get_node_rank",
        "get_world_rank",
        "get_world_size",
    ]
)
"""Functions of the old session that are methods of the context now."""

LIFE_OF_A_CLUSTER = frozenset([("ray", "init"), ("ray", "shutdown"), ("ray", "is_initialized")])
"""What a script says to Ray's cluster, and need not say where there is none."""

_DATASETS = (
    "Ray Data stays with Ray: read the data in the training function, with a DataLoader and "
    "prepare_data_loader."
)
NO_DATASETS = f"Workers are not fed with datasets yet (num_workers=0 is). {_DATASETS}"
_LATER = "spotfit has no integration of this framework yet; this line stays with Ray."
_TASKS = (
    "Tasks and actors stay with Ray: do this work in the training function, or in plain Python "
    "before fit()."
)
_CLUSTER = "There is no cluster: machines come from the trainer's provisioner=."

ADVICE: Mapping[Path, str] = {
    ("ray",): "This stays with Ray.",
    ("ray", "actor"): _TASKS,
    ("ray", "air"): "This was part of Ray AIR, and is gone.",
    ("ray", "air", "integrations"): _LATER,
    ("ray", "air", "session"): "Nothing takes its place: the run has a name and its workers ranks.",
    ("ray", "available_resources"): _CLUSTER,
    ("ray", "cluster_resources"): _CLUSTER,
    ("ray", "data"): _DATASETS,
    ("ray", "get"): _TASKS,
    ("ray", "get_gpu_ids"): "spotfit.torch.get_devices() tells the devices of this worker.",
    ("ray", "get_runtime_context"): "spotfit.get_context() tells who this worker is.",
    ("ray", "init"): "It stays, because other lines still need Ray; training needs it no more.",
    ("ray", "is_initialized"): "It stays, because other lines still need Ray.",
    ("ray", "kill"): _TASKS,
    ("ray", "method"): _TASKS,
    ("ray", "nodes"): _CLUSTER,
    ("ray", "put"): _TASKS,
    ("ray", "remote"): _TASKS,
    ("ray", "serve"): "Serving stays with Ray; a checkpoint is read with as_directory().",
    ("ray", "shutdown"): "It stays, because other lines still need Ray.",
    ("ray", "train"): "spotfit has no such name: docs/migrating_from_ray_train.md says what to do.",
    ("ray", "train", "_internal"): "This is inside Ray, and has no counterpart.",
    ("ray", "train", "horovod"): "Horovod is gone in Ray as well: use TorchTrainer.",
    ("ray", "train", "huggingface"): _LATER,
    ("ray", "train", "lightgbm"): _LATER,
    ("ray", "train", "lightning"): _LATER,
    ("ray", "train", "tensorflow"): _LATER,
    ("ray", "train", "v2", "_internal"): "This is inside Ray, and has no counterpart.",
    ("ray", "train", "v2", "jax"): _LATER,
    ("ray", "train", "v2", "lightgbm"): _LATER,
    ("ray", "train", "v2", "tensorflow"): _LATER,
    ("ray", "train", "v2", "xgboost"): _LATER,
    ("ray", "train", "xgboost"): _LATER,
    ("ray", "tune"): (
        "Tune stays with Ray: loop over the configurations and call fit() or submit() for each."
    ),
    ("ray", "util"): _CLUSTER,
    ("ray", "wait"): _TASKS,
}
"""What to do about what stays with Ray; the longest beginning of a name holds."""


@dataclass(frozen=True, slots=True)
class Here:
    """The first `parts` of the path are `name` of our `module`, or the module itself."""

    module: str
    name: str
    parts: int

    @property
    def dotted(self) -> str:
        """Where it is, in one word."""
        return f"{self.module}.{self.name}" if self.name else self.module


@dataclass(frozen=True, slots=True)
class Stays:
    """It has no counterpart; `do` says what that means."""

    do: str


def find(path: Path) -> Here | Stays:
    """Where that name of Ray is here. It may go on: `ray.train.Checkpoint.from_directory` is the
    `Checkpoint` of ours, with an attribute that is not looked at."""
    home = next((path[:n] for n in range(len(path), 1, -1) if path[:n] in FACADES), None)
    if home is None or not (names := _public(FACADES[home])):
        return Stays(_advice(path))
    rest = path[len(home) :]
    if not rest:
        return Here(FACADES[home], "", len(home))
    if home[-1] == "session" and rest[0] in ASKED_OF_THE_CONTEXT:
        return Here(FACADES[home], f"get_context().{rest[0]}", len(home) + 1)
    for at, part in enumerate(rest[:2]):
        if part in names:
            return Here(FACADES[home], part, len(home) + at + 1)
        if not _may_hold_public_names((*home, part)):
            break
    return Stays(_advice(path))


def variable(name: str) -> str | None:
    """What an environment variable of Ray Train is called here; None if there is none like it."""
    return next((setting.name for setting in SETTINGS if name and setting.also == name), None)


def what_holds(name: str) -> str:
    """What holds here instead of a variable of Ray Train that nothing reads."""
    known = WITHOUT_EFFECT.get(name)
    return known.instead if known else "there is nothing of that name here"


def _may_hold_public_names(module: Path) -> bool:
    """Whether Ray's public names may be taken from a module of it that holds the code itself."""
    inside = module[-1].startswith("_") and module[-1] != "_checkpoint"
    return module[-1].islower() and not inside and module not in ADVICE


def _advice(path: Path) -> str:
    return next(ADVICE[path[:n]] for n in range(len(path), 0, -1) if path[:n] in ADVICE)


@cache
def _public(module: str) -> frozenset[str] | None:
    """The public names of a module of ours; None if there is no such module."""
    try:
        return frozenset(importlib.import_module(module).__all__)
    except ModuleNotFoundError:
        return None
