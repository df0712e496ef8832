"""Map from public names of Ray Train to those of spotfit, and advice for names without one."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from spotfit.core.unsupported_names import CONTEXT_METHODS, UNSUPPORTED_NAMES
from spotfit.host.env import ENV_VARS, UNSUPPORTED_RAY_VARIABLES

DottedName = tuple[str, ...]
"""The parts of a dotted name: ("ray", "train")."""

RAY_ROOT: DottedName = ("ray",)
MIGRATED_PACKAGES = ("ray", "horovod")
"""The packages whose names are replaced. Horovod's scripts are commonly started by Ray."""

MODULE_MAP: Mapping[DottedName, str] = {
    ("ray", "air"): "spotfit",
    ("ray", "air", "session"): "spotfit",
    ("ray", "data"): "spotfit.data",
    ("ray", "data", "collate_fn"): "spotfit.data.collate_fn",
    ("ray", "data", "preprocessors"): "spotfit.data.preprocessors",
    ("ray", "train"): "spotfit",
    ("ray", "train", "backend"): "spotfit.backend",
    ("ray", "train", "collective"): "spotfit.collective",
    ("horovod", "torch"): "spotfit.horovod.torch",
    ("horovod", "torch", "elastic"): "spotfit.horovod.torch.elastic",
    ("ray", "train", "horovod"): "spotfit.horovod",
    ("ray", "train", "huggingface"): "spotfit.huggingface",
    ("ray", "train", "huggingface", "transformers"): "spotfit.huggingface.transformers",
    ("ray", "air", "integrations", "keras"): "spotfit.tensorflow.keras",
    ("ray", "train", "lightgbm"): "spotfit.lightgbm",
    ("ray", "train", "lightning"): "spotfit.lightning",
    ("ray", "train", "sklearn"): "spotfit.sklearn",
    ("ray", "train", "tensorflow"): "spotfit.tensorflow",
    ("ray", "train", "tensorflow", "keras"): "spotfit.tensorflow.keras",
    ("ray", "train", "torch"): "spotfit.torch",
    ("ray", "train", "torch", "xla"): "spotfit.torch.xla",
    ("ray", "train", "v2", "api"): "spotfit",
    ("ray", "train", "v2", "jax"): "spotfit.jax",
    ("ray", "train", "v2", "lightgbm"): "spotfit.lightgbm",
    ("ray", "train", "v2", "tensorflow"): "spotfit.tensorflow",
    ("ray", "train", "v2", "torch"): "spotfit.torch",
    ("ray", "train", "v2", "xgboost"): "spotfit.xgboost",
    ("ray", "train", "xgboost"): "spotfit.xgboost",
}
"""Public modules of Ray and Horovod; the spotfit modules with the same public names."""

CLUSTER_LIFECYCLE = frozenset([("ray", "init"), ("ray", "shutdown"), ("ray", "is_initialized")])
"""Calls that manage Ray's cluster. They are removed if nothing else in the script needs Ray."""

_REMOVED_TRAINER_ARGUMENTS = {
    "resume_from_checkpoint": "call fit() with the same name and storage_path, which continues",
    "metadata": "pass the values in train_loop_config",
}
REMOVED_ARGUMENTS: Mapping[str, Mapping[str, str]] = {
    "AccelerateTrainer": {
        **_REMOVED_TRAINER_ARGUMENTS,
        "accelerate_config": "pass the options to Accelerator(...) in the training function",
    },
    "CheckpointConfig": dict.fromkeys(
        ("checkpoint_at_end", "checkpoint_frequency"), "call report(checkpoint=...) instead"
    ),
    "DataParallelTrainer": _REMOVED_TRAINER_ARGUMENTS,
    "HorovodTrainer": _REMOVED_TRAINER_ARGUMENTS,
    "FailureConfig": {"fail_fast": "use max_failures=0"},
    "RunConfig": {
        "log_to_file": "remove it, output is always stored",
        "progress_reporter": "remove it, fit() prints the progress",
        "stop": "return from the training function",
        "sync_config": "remove it, files are uploaded directly to storage_path",
        "verbose": "use logging_config=LoggingConfig(log_level=...)",
    },
    "ScalingConfig": {"trainer_resources": "remove it, only workers use resources"},
    "TensorflowTrainer": _REMOVED_TRAINER_ARGUMENTS,
    "TorchTrainer": _REMOVED_TRAINER_ARGUMENTS,
    "TransformersTrainer": {
        **_REMOVED_TRAINER_ARGUMENTS,
        "trainer_init_config": "rename it to train_loop_config",
        "trainer_init_per_worker": "rename it to train_loop_per_worker: a function of the "
        "configuration that returns the Trainer, with its datasets",
    },
}
"""Arguments of Ray Train's V1 API, which raise DeprecationWarning, and what to do about them."""

CHANGED_CALLS: Mapping[str, str] = {
    "BatchPredictor": "predict() takes files, DataFrames or arrays instead of a Dataset, and "
    "returns a PredictionResult: use its to_pandas() or iter_shards(), or "
    "spotfit.data.read_parquet(predictions.url).",
}
"""Names whose objects take or return something else, and what to change where they are used."""
_NO_INTEGRATION_ADVICE = "spotfit does not integrate this framework yet; this line still uses Ray."
_TASKS_ADVICE = (
    "spotfit has no tasks and actors: do this work in the training function, or in plain Python "
    "before fit()."
)
_CLUSTER_ADVICE = "spotfit has no cluster: the provisioner= of the trainer provides machines."
_HOROVOD_TENSORFLOW_ADVICE = (
    "spotfit.horovod is for PyTorch: use spotfit.tensorflow.TensorflowTrainer with "
    "tf.distribute.MultiWorkerMirroredStrategy."
)
_STILL_NEEDED = "Not removed, because other lines still need Ray."


def _explain_unsupported(module: str, name: str) -> str:
    unsupported = UNSUPPORTED_NAMES[module][name]
    return f"{unsupported.reason} {unsupported.do}"


_TASKS = ("actor", "get", "kill", "method", "put", "remote", "wait")
_CLUSTER = ("available_resources", "cluster_resources", "nodes", "util")
ADVICE: Mapping[DottedName, str] = {
    **{("ray", name): _TASKS_ADVICE for name in _TASKS},
    **{("ray", name): _CLUSTER_ADVICE for name in _CLUSTER},
    ("horovod",): (
        "spotfit.horovod has Horovod's interface for PyTorch only, and HorovodTrainer starts the "
        "workers; see docs/guides/horovod.md."
    ),
    ("horovod", "keras"): _HOROVOD_TENSORFLOW_ADVICE,
    ("horovod", "tensorflow"): _HOROVOD_TENSORFLOW_ADVICE,
    ("horovod", "torch"): "spotfit.horovod.torch has no such name; see docs/guides/horovod.md.",
    ("ray",): "spotfit has no equivalent; this line still uses Ray.",
    ("ray", "air"): "This was part of Ray AIR, which no longer exists.",
    ("ray", "air", "integrations"): _NO_INTEGRATION_ADVICE,
    ("ray", "air", "session"): "There is no equivalent; spotfit.get_context() has name and ranks.",
    ("ray", "data"): "spotfit.data has no such name; see docs/guides/data.md.",
    ("ray", "data", "_internal"): "This is internal to Ray and has no equivalent.",
    ("ray", "get_gpu_ids"): "Use spotfit.torch.get_devices() for the devices of this worker.",
    ("ray", "get_runtime_context"): "Use spotfit.get_context() for the ranks of this worker.",
    ("ray", "init"): f"{_STILL_NEEDED} Training does not need it.",
    ("ray", "is_initialized"): _STILL_NEEDED,
    ("ray", "serve"): "spotfit has no serving; read a checkpoint with as_directory().",
    ("ray", "shutdown"): _STILL_NEEDED,
    ("ray", "train"): "spotfit has no such name; see docs/migrating_from_ray_train.md.",
    ("ray", "train", "_internal"): "This is internal to Ray and has no equivalent.",
    ("ray", "train", "huggingface"): "spotfit.huggingface has no such name; see its guide.",
    ("ray", "train", "horovod"): "spotfit.horovod has no such name; see docs/guides/horovod.md.",
    ("ray", "train", "v2", "_internal"): "This is internal to Ray and has no equivalent.",
    ("ray", "tune"): _explain_unsupported("spotfit", "tune"),
    ("ray", "tune", "integration", "ray_train", "TuneReportCallback"): _explain_unsupported(
        "spotfit", "TuneReportCallback"
    ),
}
"""What to do about names without an equivalent; the longest matching prefix applies."""


@dataclass(frozen=True, slots=True)
class SpotfitName:
    """The spotfit equivalent of the first `matched_parts` parts of a Ray name.

    `name` is an attribute of `module`, or '' for the module itself.
    """

    module: str
    name: str
    matched_parts: int

    @property
    def dotted(self) -> str:
        """The full dotted name, such as "spotfit.torch.prepare_model" or "spotfit"."""
        return f"{self.module}.{self.name}" if self.name else self.module


@dataclass(frozen=True, slots=True)
class NoCounterpart:
    """A Ray name without a spotfit equivalent; `do` is the advice for the user."""

    do: str


def find_counterpart(path: DottedName) -> SpotfitName | NoCounterpart:
    """Return the spotfit equivalent of a Ray name, or advice if there is none.

    `path` is the name in parts, such as ("ray", "train", "report"). Attributes of a mapped name are
    not checked: `ray.train.Checkpoint.from_directory` maps to `spotfit.Checkpoint` with 3 matched
    parts.
    """
    # The longest mapped prefix: ray.train.torch before ray.train.
    ray_module = next((path[:n] for n in range(len(path), 1, -1) if path[:n] in MODULE_MAP), None)
    if ray_module is None or not (names := _public_names(MODULE_MAP[ray_module])):
        return NoCounterpart(_find_advice(path))
    module, attributes = MODULE_MAP[ray_module], path[len(ray_module) :]
    if not attributes:
        return SpotfitName(module, "", len(ray_module))
    if ray_module[-1] == "session" and attributes[0] in CONTEXT_METHODS:
        return SpotfitName(module, f"get_context().{attributes[0]}", len(ray_module) + 1)
    unsupported = UNSUPPORTED_NAMES.get(module, {})
    # Public names may also be imported from the submodule that defines them, such as
    # ray.train.trainer.TorchTrainer.
    for at, part in enumerate(attributes[:2]):
        if part in names:
            return SpotfitName(module, part, len(ray_module) + at + 1)
        if part in unsupported and (moved_to := unsupported[part].moved_to):
            new_name = unsupported[part].new_name or part
            return SpotfitName(moved_to, new_name, len(ray_module) + at + 1)
        if part in unsupported:
            return NoCounterpart(_explain_unsupported(module, part))
        # Of internal modules, scripts commonly import Checkpoint from ray.train._checkpoint.
        is_internal = part.startswith("_") and part != "_checkpoint"
        if is_internal or not part.islower() or (*ray_module, part) in ADVICE:
            break
    return NoCounterpart(_find_advice(path))


def find_variable(name: str) -> str | None:
    """Return the spotfit variable equivalent to a Ray environment variable; None without one."""
    return next((each.name for each in ENV_VARS if name and each.ray_name == name), None)


def explain_ignored_variable(name: str) -> str:
    """Return how spotfit behaves instead of reading the Ray environment variable `name`.

    A part of a sentence without a period; also for unknown names.
    """
    known = UNSUPPORTED_RAY_VARIABLES.get(name)
    return known.explanation if known else "spotfit has no variable of this name"


def _find_advice(path: DottedName) -> str:
    return next(ADVICE[path[:n]] for n in range(len(path), 0, -1) if path[:n] in ADVICE)


# Cached: reading `__all__` imports the module, and it is looked up for every use.
@cache
def _public_names(module: str) -> frozenset[str] | None:
    """Return the public names of a spotfit module, or None if the module does not exist."""
    try:
        return frozenset(importlib.import_module(module).__all__)
    except ModuleNotFoundError:
        return None
