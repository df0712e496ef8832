"""Intended differences from Ray Train with their reasons. The migration guide lists all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

INTENTIONAL_DIFFERENCES: Mapping[str, str] = {
    "HorovodConfig.start_timeout": "It belongs to Horovod's launcher, which does not run here.",
    "HorovodTrainer": "It trains, with the arguments of Ray; in Ray 2.60 it raises "
    "`DeprecationWarning` ([guide](../guides/horovod.md)).",
    "LightGBMTrainer": "Without a training function, V1 arguments describe the training "
    "([guide](../guides/lightgbm.md)).",
    "TrainRunContext": "It is passed to callbacks, which read it and never create one.",
    "XGBoostTrainer": "Without a training function, V1 arguments describe the training "
    "([guide](../guides/xgboost.md)).",
}
"""Signatures that differ from those of Ray Train 2.60: a name, or a name and its member."""

_DEVICES = "The devices follow from `ScalingConfig`."
_HOROVOD = "Workers are started by agents, and communicate by `torch.distributed`."
_BY_PROVISIONER = (
    "Validated as in Ray, without effect, which `fit()` logs: the provisioner chooses machines."
)
_NO_PLACEMENT_GROUPS = "There are no placement groups: raises `DeprecationWarning`."

BEHAVES_DIFFERENTLY: Mapping[str, str] = {
    "ray.train.DataConfig(enable_shard_locality)": "Without effect: stores have no locality.",
    "ray.train.DataConfig(execution_options)": "Without effect: there are no tasks.",
    "ray.train.ScalingConfig(label_selector)": _BY_PROVISIONER,
    "ray.train.ScalingConfig(placement_strategy)": _BY_PROVISIONER,
    "ray.train.ScalingConfig(topology)": _BY_PROVISIONER,
    "ray.train.ScalingConfig.as_placement_group_factory": _NO_PLACEMENT_GROUPS,
    "ray.train.ScalingConfig.from_placement_group_factory": _NO_PLACEMENT_GROUPS,
    "ray.train.ValidationConfig(ray_remote_kwargs)": "Resources have an effect; options of Ray's "
    "scheduler have none, and others are rejected.",
    **{
        f"ray.train.horovod.HorovodConfig({name})": f"Without effect. {_HOROVOD}"
        for name in (
            *("nics", "verbose", "key", "ssh_port", "ssh_identity_file", "ssh_str", "timeout_s"),
            "placement_group_timeout_s",
        )
    },
    "ray.train.v2.jax.JaxConfig(use_gpu)": _DEVICES,
    "ray.train.v2.jax.JaxConfig(use_tpu)": _DEVICES,
    "ray.train.v2.jax.JaxTrainer": "Without GPUs and TPUs all workers form one runtime with gloo.",
    "ray.train.v2.torch.torchft_config.TorchftConfig": "A failed replica restarts all replicas, in "
    "a tenth of a second.",
}
"""Names, members and parameters with Ray's signature and another effect, by their full name."""

NAME_NOTES: Mapping[str, str] = {
    "ray.train.Checkpoint": "hashes are checked; also of GCS and Azure, and of fsspec",
    "ray.train.DataConfig": "also `resume=`, `num_workers=`; workers call an overridden "
    "`configure` ([datasets](../guides/data.md))",
    "ray.train.NCCLHangError": "`spotfit.HangError`, for any framework "
    "([hangs](../guides/failures.md#hangs))",
    "ray.train.Result": "also metrics without checkpoints",
    "ray.train.RunConfig": "also `time_budget_s`, limits of time and cost "
    "([guide](../guides/deadline.md)), and `preload` "
    "([guide](../guides/code_and_data.md#preloading))",
    "ray.train.UserCallback": "runs in a process beside the workers "
    "([callbacks](../guides/callbacks.md))",
    "ray.train.ValidationConfig": "also `own_machine=` ([validation](../guides/validation.md))",
    "ray.train.get_dataset_shard": "with `num_workers=0` also returns objects that are no datasets",
    "ray.train.report": "does not wait without a checkpoint",
    "ray.train.collective.broadcast_from_rank_zero": "up to 4 MiB",
    "ray.train.error.SessionMisuseError": "a RuntimeError",
    "ray.train.backend.Backend": "[backends](../guides/backends.md)",
    "ray.train.huggingface.transformers.RayTrainReportCallback": "a directory that ranks share is "
    "uploaded once ([guide](../guides/huggingface.md))",
    "ray.train.huggingface.transformers.prepare_trainer": "also `every=`, which saves while "
    "training continues and resumes exactly",
    "ray.train.lightning.RayDDPStrategy": "for `lightning.pytorch` or `pytorch_lightning`, "
    "whichever the script imports ([guide](../guides/lightning.md))",
    "ray.train.lightning.RayTrainReportCallback": "also `every_n_epochs=`; ranks without files "
    "report metrics only",
    "ray.train.lightning.prepare_trainer": "`Trainer.fit` also rejects a trainer that was not "
    "prepared",
    "ray.train.tensorflow.TensorflowTrainer": "also `provisioner=`, `submit()` "
    "([guide](../guides/tensorflow.md))",
    "ray.train.tensorflow.TensorflowCheckpoint": "deprecated, as in Ray",
    "ray.train.tensorflow.keras.ReportCheckpointCallback": "uploads the model of rank 0 in the "
    "background; `restore_model` continues",
    "ray.train.torch.TorchCheckpoint": "deprecated, as in Ray: use `spotfit.Checkpoint`",
    "ray.train.torch.TorchConfig": "invalid values are reported by `fit()`, before anything is "
    "rented",
    "ray.train.torch.TorchTrainer": "also `provisioner=`, `submit()`",
    "ray.train.torch.accelerate": "raises DeprecationWarning, as in Ray",
    "ray.train.torch.backward": "raises DeprecationWarning, as in Ray",
    "ray.train.torch.prepare_optimizer": "raises DeprecationWarning, as in Ray",
    "ray.train.torch.prepare_data_loader": "keeps all arguments; not wrapped on a CPU",
    "ray.train.torch.prepare_model": 'also `parallel_strategy="fsdp2"`, on CPUs as well',
    "ray.train.v2.api.data_parallel_trainer.DataParallelTrainer": "also `provisioner=`, `submit()`",
    "ray.train.xgboost.RayTrainReportCallback": "checkpoints are uploaded in the background",
    "ray.train.lightgbm.RayTrainReportCallback": "checkpoints are uploaded in the background",
}
"""Remarks about names that are the same, by their full name."""

_OF_TRAIN_V2 = "The arguments are those of Ray Train V2"

V1_DIFFERENCES: Mapping[str, str] = {
    "AccelerateTrainer": f"{_OF_TRAIN_V2}; options of `accelerate_config` are arguments of "
    "`Accelerator(...)`.",
    "BatchPredictor": "`predict` returns a `PredictionResult`; `predict_pipelined`, "
    "`from_pandas_udf` and `ray_remote_args` raise an error with the way out.",
    "HuggingFaceTrainer": f"It has the later name only. {_OF_TRAIN_V2}: `train_loop_per_worker` "
    "instead of `trainer_init_per_worker`.",
    "LightningTrainer": f"{_OF_TRAIN_V2}: `train_loop_per_worker` instead of `lightning_config`.",
    "Predictor": "Without `from_pandas_udf` and `preferred_batch_format`: `spotfit.predict` takes "
    "functions and `batch_format=`.",
    "SklearnTrainer": "Without `preprocessor=`, `restore` and the methods for subclasses of "
    "trainers.",
    "TransformersTrainer": f"{_OF_TRAIN_V2}: `train_loop_per_worker` instead of "
    "`trainer_init_per_worker`.",
}
"""Names of V1 that exist here with other arguments or methods. Predictors differ as `Predictor`."""


class BehaviorDifference(NamedTuple):
    """The result of a probe, and the text of the guide that documents it."""

    expected: Any
    guide: str


_TRAINING_FAILED = {"is": ["TrainingFailedError", "WorkerGroupError"]}

BEHAVIOR_DIFFERENCES: Mapping[str, BehaviorDifference] = {
    "metrics_without_a_checkpoint": BehaviorDifference([{"loss": 1}, None, []], "`Result.metrics`"),
    "a_name_used_twice": BehaviorDifference(
        [[{"n": 1}], ["file0"]], "a `checkpoint_dir_name` that was used"
    ),
    "a_score_that_is_missing_where_least_is_best": BehaviorDifference(
        [{"rank": 0, "score": 1}, {"rank": 0, "score": 0}], "a checkpoint without the score"
    ),
    "numbers_of_numpy_in_the_metrics_of_a_checkpoint": BehaviorDifference(None, "numbers of numpy"),
    "report_without_a_dictionary": BehaviorDifference(_TRAINING_FAILED, "`report(5)`"),
    "elastic_group_with_minimum_0": BehaviorDifference(
        {"is": ["ValueError"]}, "`num_workers=(0, n)`"
    ),
    "non_numeric_score": BehaviorDifference(
        [{"is": ["ControllerError", "TrainingFailedError"]}, {"is": []}], "a score that is no"
    ),
    "invalid_calls_in_local_mode": BehaviorDifference(
        [True, {"is": ["KeyError"]}, {"is": ["RuntimeError"]}], "an unknown dataset"
    ),
    "worker_that_exits_immediately": BehaviorDifference(
        [_TRAINING_FAILED, "xx"], "a worker that dies in its first"
    ),
    "a_checkpoint_in_local_mode": BehaviorDifference(
        [True, True], "`get_checkpoint` with `num_workers=0`"
    ),
}
"""Probes of tests/parity/behaviour.py with different results than with Ray Train."""
