"""Names and arguments of Ray Train and Ray AIR that spotfit does not have, and what to use instead.

Read by the `__getattr__` of the modules, by `python -m spotfit.migrate` and by the tests of parity.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import FrameType
from typing import NamedTuple

from spotfit.core.errors import UnsupportedNameError


class UnsupportedName(NamedTuple):
    """Why a module does not have a name of Ray, and the remedy, each as sentences."""

    reason: str
    do: str
    moved_to: str = ""
    """The module of spotfit that has the name, or ''."""
    new_name: str = ""
    """Its name there; '' if it is the same."""


def _moved(name: str, module: str) -> UnsupportedName:
    return UnsupportedName(f"It is in {module}.", f"Use {module}.{name}.", module)


def _method_of_context(name: str) -> UnsupportedName:
    return UnsupportedName(
        "It is a method of the train context.", f"Call spotfit.get_context().{name}()."
    )


_NO_TUNE = "spotfit has no Tune."
_NO_TRIALS = UnsupportedName(
    f"{_NO_TUNE} A run has no trials.",
    "Use spotfit.get_context().get_experiment_name(), which is the name of the run.",
)
_TUNE = UnsupportedName(
    _NO_TUNE, "Loop over the configurations and call fit() or submit() for each."
)
_NO_FRAMEWORK_CHECKPOINT = UnsupportedName(
    "It was removed from Ray, too.",
    "Read the files of a spotfit.Checkpoint in checkpoint.as_directory().",
)
_NO_FRAMEWORK_PREDICTOR = UnsupportedName(
    "It was removed from Ray, too.",
    "Pass spotfit.predict() a class that loads the model in __init__ and predicts a batch in "
    "__call__.",
)
_TRANSFORMERS_TRAINER = UnsupportedName(
    "It is an earlier name of TransformersTrainer.",
    "Use spotfit.huggingface.TransformersTrainer.",
    moved_to="spotfit.huggingface",
    new_name="TransformersTrainer",
)
_REINFORCEMENT_LEARNING = UnsupportedName(
    "RLlib runs on actors of Ray, and its trainer was removed from Ray, too.",
    "Use Ray for RLlib; a training function of spotfit can run any other loop on each worker.",
)
_COMPOSER = UnsupportedName(
    "It was removed from Ray, too.",
    "Create and run Composer's Trainer in the training function of a spotfit.torch.TorchTrainer.",
)
CONTEXT_METHODS = (
    "get_experiment_name",
    "get_local_rank",
    "get_local_world_size",
    "get_node_rank",
    "get_world_rank",
    "get_world_size",
)
"""Functions of `ray.air.session` that became methods of the train context."""

_NO_PLACEMENT_GROUPS = UnsupportedName(
    "spotfit has no placement groups.", "State the resources of a worker in spotfit.ScalingConfig."
)

UNSUPPORTED_NAMES: Mapping[str, Mapping[str, UnsupportedName]] = {
    "spotfit": {
        "AcquiredResources": _NO_PLACEMENT_GROUPS,
        "BaseTrainer": UnsupportedName(
            "It was removed from Ray, too.",
            "Use spotfit.DataParallelTrainer, with a spotfit.BackendConfig for a framework of your "
            "own.",
        ),
        "BatchPredictor": _moved("BatchPredictor", "spotfit.prediction"),
        "DataBatchType": UnsupportedName(
            "It was an alias for type checkers, and was removed from Ray, too.",
            "Use dict[str, numpy.ndarray] or pandas.DataFrame.",
        ),
        "DatasetConfig": UnsupportedName(
            "It was removed from Ray, too.",
            "Use spotfit.DataConfig(datasets_to_split=[...]); all datasets are split by default.",
        ),
        "GBDTTrainer": UnsupportedName(
            "It was a base class of Ray, and was removed.",
            "Use spotfit.xgboost.XGBoostTrainer or spotfit.lightgbm.LightGBMTrainer.",
        ),
        "LightGBMPredictor": _moved("LightGBMPredictor", "spotfit.prediction"),
        "MosaicTrainer": _COMPOSER,
        "Predictor": _moved("Predictor", "spotfit.prediction"),
        "RLCheckpoint": _REINFORCEMENT_LEARNING,
        "RLPredictor": _REINFORCEMENT_LEARNING,
        "RLTrainer": _REINFORCEMENT_LEARNING,
        "ResourceRequest": _NO_PLACEMENT_GROUPS,
        "SklearnPredictor": _moved("SklearnPredictor", "spotfit.prediction"),
        "TensorflowPredictor": _moved("TensorflowPredictor", "spotfit.prediction"),
        "TorchPredictor": _moved("TorchPredictor", "spotfit.prediction"),
        "TrainingIterator": UnsupportedName(
            "It was internal to Ray, and was removed.",
            "Use a spotfit.UserCallback, whose after_report() gets the metrics of each report.",
        ),
        "TuneReportCallback": UnsupportedName(
            _NO_TUNE,
            "Use a spotfit.UserCallback, whose after_report() gets the metrics of each report.",
        ),
        "Tuner": _TUNE,
        "XGBoostPredictor": _moved("XGBoostPredictor", "spotfit.prediction"),
        "session": UnsupportedName(
            "The functions of ray.air.session are in spotfit itself.",
            "Write `import spotfit as session`.",
        ),
        "tune": _TUNE,
        **{name: _method_of_context(name) for name in CONTEXT_METHODS},
        **dict.fromkeys(
            ("get_trial_dir", "get_trial_id", "get_trial_name", "get_trial_resources"), _NO_TRIALS
        ),
    },
    "spotfit.huggingface": {
        "HuggingFaceCheckpoint": _NO_FRAMEWORK_CHECKPOINT,
        "HuggingFacePredictor": _NO_FRAMEWORK_PREDICTOR,
        "HuggingFaceTrainer": _TRANSFORMERS_TRAINER,
        "TransformersCheckpoint": _NO_FRAMEWORK_CHECKPOINT,
        "TransformersPredictor": _NO_FRAMEWORK_PREDICTOR,
    },
    "spotfit.lightgbm": {"LightGBMPredictor": _moved("LightGBMPredictor", "spotfit.prediction")},
    "spotfit.lightning": {
        "LightningCheckpoint": _NO_FRAMEWORK_CHECKPOINT,
        "LightningConfigBuilder": UnsupportedName(
            "It was removed from Ray, too.",
            "Create the module and the lightning Trainer in a train_loop_per_worker, prepare the "
            "Trainer with spotfit.lightning.prepare_trainer, and call its fit().",
        ),
        "LightningPredictor": _NO_FRAMEWORK_PREDICTOR,
    },
    "spotfit.sklearn": {
        "SklearnCheckpoint": UnsupportedName(
            "It was removed from Ray, too.",
            "spotfit.sklearn.SklearnTrainer.get_model(checkpoint) returns the estimator.",
        ),
        "SklearnPredictor": _moved("SklearnPredictor", "spotfit.prediction"),
    },
    "spotfit.tensorflow": {
        "TensorflowPredictor": _moved("TensorflowPredictor", "spotfit.prediction")
    },
    "spotfit.torch": {
        "TorchDetectionPredictor": _NO_FRAMEWORK_PREDICTOR,
        "TorchPredictor": _moved("TorchPredictor", "spotfit.prediction"),
    },
    "spotfit.xgboost": {"XGBoostPredictor": _moved("XGBoostPredictor", "spotfit.prediction")},
}
"""By module of spotfit, which is that to which the module of Ray is migrated."""


UNSUPPORTED_ARGUMENTS: Mapping[str, str] = {
    "datasets_iter_config": "Pass its options to iter_torch_batches() of "
    "spotfit.get_dataset_shard() in the training function.",
    "lightning_config": "Pass a train_loop_per_worker that creates the module and the lightning "
    "Trainer, prepares the Trainer with spotfit.lightning.prepare_trainer, and calls its fit().",
    "preprocessor": "Transform the datasets before: "
    "spotfit.data.preprocessors.preprocess_datasets() does so for datasets, and transform_batch() "
    "of the preprocessor for DataFrames.",
}
"""Arguments that only trainers of Ray AIR had, and what to do instead."""


def missing_attribute_error(
    module: str, name: str, unsupported: UnsupportedName | None = None
) -> AttributeError | UnsupportedNameError:
    """Return what the `__getattr__` of a package raises for a name that it does not have.

    An AttributeError, which has the remedy if the name is one of Ray. For `from module import name`
    of such a name an `UnsupportedNameError`: an AttributeError would lose its text. To be called by
    `__getattr__` itself. `unsupported` describes a name that is not in `UNSUPPORTED_NAMES`.
    """
    unsupported = unsupported or UNSUPPORTED_NAMES.get(module, {}).get(name)
    if unsupported is None:
        return AttributeError(f"module {module!r} has no attribute {name!r}")
    error = UnsupportedNameError(
        f"{module} has no {name}. {unsupported.reason}", do=unsupported.do, name=name
    )
    caller = sys._getframe(2)  # noqa: SLF001 # documented; `inspect` is slow to import
    return error if _is_from_import(caller) else AttributeError(str(error))


def _is_from_import(caller: FrameType) -> bool:
    """Whether `caller`, which has accessed an attribute of a package, is a `from` import.

    Before it imports a missing name as a submodule, the import system asks for it with `hasattr`,
    in this function of CPython, which any exception but an AttributeError leaves. In another Python
    the import raises an ImportError without the remedy.
    """
    code = caller.f_code
    return (code.co_name, code.co_filename) == (
        "_handle_fromlist",
        "<frozen importlib._bootstrap>",
    )
