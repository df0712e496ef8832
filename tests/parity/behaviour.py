"""The same small trainings with Ray Train and with spotfit; each probe returns its observations.

    python -m tests.parity.behaviour ray.train /tmp/scratch
    python -m tests.parity.behaviour spotfit /tmp/scratch

write the results by probe to /tmp/scratch/seen.json. Ray's results are stored next to this file
and compared in tests/live; `make parity` records them again. Probes use only the module `train`
that they get, so that they do not depend on the side.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

PROBES: dict[str, Callable[[TrainingApi], Any]] = {}
UNUSED_PATH = "/tmp/nowhere"  # noqa: S108 - a path that is only written down
RAY_TRAINER_MODULE = "ray.train.v2.api.data_parallel_trainer"


class TrainingApi:
    """One side: its module, and a directory per probe."""

    def __init__(self, name: str, scratch: Path) -> None:
        self.name = name
        self.train: Any = importlib.import_module(name)
        self.torch: Any = importlib.import_module(f"{name}.torch")
        self.data: Any = importlib.import_module("ray.data" if "ray" in name else f"{name}.data")
        self.scratch = scratch

    @property
    def trainer(self) -> Any:
        home = importlib.import_module(RAY_TRAINER_MODULE) if "ray" in self.name else self.train
        return home.DataParallelTrainer

    def fit(self, fn: Any, workers: Any = 2, torch: bool = False, **options: Any) -> Any:
        """Train `fn` with a config that names this side; `run` and `more` go to the configs."""
        run = {"name": "run", "storage_path": str(self.scratch)} | options.pop("run", {})
        config = {"api": self.name, "place": str(self.scratch)} | options.pop("config", {})
        kind = self.torch.TorchTrainer if torch else self.trainer
        return kind(
            fn,
            train_loop_config=config,
            scaling_config=self.train.ScalingConfig(num_workers=workers),
            run_config=self.train.RunConfig(**run),
            **options,
        ).fit()


def probe(function: Callable[[TrainingApi], Any]) -> Callable[[TrainingApi], Any]:
    PROBES[function.__name__] = function
    return function


def import_api(config: dict[str, Any]) -> ModuleType:
    return importlib.import_module(config["api"])


def known_bases(error: BaseException | None) -> Any:
    """Describe an exception by its classes of Python and Ray Train."""
    if error is None:
        return None
    known = {"ValueError", "TypeError", "RuntimeError", "AttributeError", "KeyError"}
    known |= {"DeprecationWarning", "SystemExit", "AssertionError", "ZeroDivisionError"}
    known |= {"TrainingFailedError", "WorkerGroupError", "ControllerError", "PreemptionError"}
    return {"is": sorted({kind.__name__ for kind in type(error).__mro__} & known)}


def catch(call: Callable[[], Any]) -> Any:
    try:
        call()
    except BaseException as error:  # noqa: BLE001 - what is raised is what is asked
        return error
    return None


def report_steps(config: dict[str, Any]) -> Any:
    """Report the given metrics, one after the other, each with a checkpoint of every rank."""
    train: Any = import_api(config)
    rank = train.get_context().get_world_rank()
    for number, metrics in enumerate(config["metrics"]):
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, f"rank{rank}").write_text(f"{number}")
            checkpoint = train.Checkpoint.from_directory(folder)
            train.report(
                {**metrics, "rank": rank} if metrics is not None else {},
                checkpoint=checkpoint,
                checkpoint_dir_name=f"c{number}",
            )


def visible_names(folder: str | Path) -> list[str]:
    return sorted(one.name for one in Path(folder).iterdir() if one.name[0] != ".")


def checkpoint_folders(api: TrainingApi) -> list[str]:
    return [
        name for name in visible_names(api.scratch / "run") if (api.scratch / "run" / name).is_dir()
    ]


def best_metrics(result: Any) -> list[Any]:
    return [metrics for _, metrics in result.best_checkpoints]


def checkpoint_config(api: TrainingApi, **options: Any) -> dict[str, Any]:
    return {"run": {"checkpoint_config": api.train.CheckpointConfig(**options)}}


# --- the function and its result ------------------------------------------------------------------


@probe
def return_value_of_rank_0(api: TrainingApi) -> Any:
    def f(config: dict[str, Any]) -> Any:
        return {"rank": import_api(config).get_context().get_world_rank()}

    return api.fit(f).return_value


@probe
def parameter_with_a_default_gets_no_config(api: TrainingApi) -> Any:
    def f(config: Any = None) -> Any:
        return config

    return api.fit(f).return_value


@probe
def a_function_of_two_parameters(api: TrainingApi) -> Any:
    def f(a: Any, b: Any) -> None: ...

    return known_bases(catch(lambda: api.fit(f)))


@probe
def non_callable_function(api: TrainingApi) -> Any:
    return known_bases(catch(lambda: api.fit(3)))


@probe
def what_cannot_be_pickled(api: TrainingApi) -> Any:
    import threading

    lock = threading.Lock()

    def f() -> Any:
        return lock

    return known_bases(catch(lambda: api.fit(f)))


@probe
def the_config_of_the_driver_stays_as_it_is(api: TrainingApi) -> Any:
    config_with_list: dict[str, Any] = {"list": []}

    def f(config: dict[str, Any]) -> Any:
        config["list"].append(1)
        return config["list"]

    return [api.fit(f, config=config_with_list).return_value, config_with_list]


@probe
def a_tensor_cannot_be_returned(api: TrainingApi) -> Any:
    def f() -> Any:
        import torch

        return {"tensor": torch.ones(1)}

    error: Any = catch(lambda: api.fit(f))
    return [known_bases(error), known_bases(error.worker_failures[0])]


WORKER_FIELDS = ("world_size", "world_rank", "local_rank", "local_world_size", "node_rank")


@probe
def ranks_of_the_workers(api: TrainingApi) -> Any:
    def f(config: dict[str, Any]) -> None:
        train: Any = import_api(config)
        context = train.get_context()
        result = [getattr(context, f"get_{name}")() for name in WORKER_FIELDS]
        result += [context.get_experiment_name()]
        result += [Path(context.get_storage().experiment_fs_path).name]
        Path(config["place"], f"result{context.get_world_rank()}").write_text(json.dumps(result))

    api.fit(f, workers=2)
    return [json.loads((api.scratch / f"result{rank}").read_text()) for rank in range(2)]


# --- reports, checkpoints, retention --------------------------------------------------------------


@probe
def metrics_without_a_checkpoint(api: TrainingApi) -> Any:
    def f(config: dict[str, Any]) -> None:
        import_api(config).report({"loss": 1})

    result = api.fit(f)
    return [result.metrics, result.checkpoint, result.best_checkpoints]


@probe
def files_of_all_ranks_and_metrics_of_rank_0(api: TrainingApi) -> Any:
    result = api.fit(report_steps, config={"metrics": [{"loss": 1}, {"loss": 2}]})
    with result.checkpoint.as_directory() as folder:
        files = visible_names(folder)
    path = result.path.endswith("/run"), result.checkpoint.path.endswith("/run/c1")
    return [result.metrics, files, best_metrics(result), checkpoint_folders(api), path]


@probe
def the_last_two_are_kept(api: TrainingApi) -> Any:
    many = {"metrics": [{"loss": n} for n in range(4)]}
    result = api.fit(report_steps, config=many, **checkpoint_config(api, num_to_keep=2))
    return [checkpoint_folders(api), best_metrics(result), result.metrics]


@probe
def the_best_two_are_kept_and_the_latest(api: TrainingApi) -> Any:
    many = {"metrics": [{"score": n} for n in (3, 1, 4, 2)]}
    how = checkpoint_config(api, num_to_keep=2, checkpoint_score_attribute="score")
    result = api.fit(report_steps, config=many, **how)
    again = api.train.Result.from_path(str(api.scratch / "run"))
    best = result.get_best_checkpoint("score", "max").path.rpartition("/")[2]
    return [
        checkpoint_folders(api),
        best_metrics(result),
        result.metrics,
        best_metrics(again),
        best,
    ]


@probe
def the_lowest_of_a_nested_score(api: TrainingApi) -> Any:
    many = {"metrics": [{"eval": {"loss": n}} for n in (3, 1, 4, 2)]}
    how = checkpoint_config(
        api, num_to_keep=2, checkpoint_score_attribute="eval/loss", checkpoint_score_order="min"
    )
    result = api.fit(report_steps, config=many, **how)
    return [checkpoint_folders(api), best_metrics(result)]


@probe
def a_score_that_is_missing_where_most_is_best(api: TrainingApi) -> Any:
    many = {"metrics": [{"score": 1}, {}, {"score": 0}, {"score": 2}]}
    how = checkpoint_config(api, num_to_keep=2, checkpoint_score_attribute="score")
    return best_metrics(api.fit(report_steps, config=many, **how))


@probe
def a_score_that_is_missing_where_least_is_best(api: TrainingApi) -> Any:
    many = {"metrics": [{"score": 1}, {}, {"score": 0}, {"score": 2}]}
    how = checkpoint_config(
        api, num_to_keep=2, checkpoint_score_attribute="score", checkpoint_score_order="min"
    )
    return best_metrics(api.fit(report_steps, config=many, **how))


@probe
def numbers_of_numpy_in_the_metrics_of_a_checkpoint(api: TrainingApi) -> Any:
    def f(config: dict[str, Any]) -> None:
        import numpy as np

        report_steps({**config, "metrics": [{"loss": np.float32(0.5), "step": np.int64(3)}]})

    error = catch(lambda: api.fit(f, workers=1))
    return known_bases(error)


@probe
def report_without_a_dictionary(api: TrainingApi) -> Any:
    def f(config: dict[str, Any]) -> None:
        import_api(config).report(5)

    return known_bases(catch(lambda: api.fit(f, workers=1)))


@probe
def a_report_with_a_tensor(api: TrainingApi) -> Any:
    def f(config: dict[str, Any]) -> None:
        import torch

        import_api(config).report({"loss": torch.ones(1)})

    error: Any = catch(lambda: api.fit(f, workers=1))
    return [known_bases(error), known_bases(error.worker_failures[0])]


@probe
def non_numeric_score(api: TrainingApi) -> Any:
    many = {"metrics": [{"score": "high"}, {"score": "low"}]}
    how = checkpoint_config(api, num_to_keep=1, checkpoint_score_attribute="score")
    error: Any = catch(lambda: api.fit(report_steps, workers=1, config=many, **how))
    return [known_bases(error), known_bases(error.controller_failure)]


@probe
def files_of_rank_1_alone_without_a_name(api: TrainingApi) -> Any:
    def f(config: dict[str, Any]) -> None:
        train: Any = import_api(config)
        rank = train.get_context().get_world_rank()
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, f"rank{rank}").touch()
            checkpoint = train.Checkpoint.from_directory(folder) if rank == 1 else None
            train.report({"rank": rank}, checkpoint=checkpoint)

    result = api.fit(f)
    with result.checkpoint.as_directory() as folder:
        files = visible_names(folder)
    name = result.checkpoint.path.rpartition("/")[2]
    return [result.metrics, files, re.sub(r"\d", "0", name)]


@probe
def storage_access_of_workers(api: TrainingApi) -> Any:
    def f(config: dict[str, Any]) -> Any:
        train: Any = import_api(config)
        storage = train.get_context().get_storage()
        folder = tempfile.mkdtemp()
        Path(folder, "file").touch()
        kept = storage.persist_current_checkpoint(train.Checkpoint.from_directory(folder), "mine")
        paths = [
            storage.storage_fs_path,
            storage.experiment_fs_path,
            storage.build_checkpoint_path_from_name("c"),
            kept.path,
        ]
        return [
            storage.experiment_dir_name,
            [path.removeprefix(config["place"]) for path in paths],
            type(storage.storage_filesystem).__name__,
            train.get_preemption_info(),
        ]

    result = api.fit(f, workers=1)
    return [result.return_value, checkpoint_folders(api), result.checkpoint]


@probe
def a_name_used_twice(api: TrainingApi) -> Any:
    def f(config: dict[str, Any]) -> None:
        train: Any = import_api(config)
        for number in range(2):
            with tempfile.TemporaryDirectory() as folder:
                Path(folder, f"file{number}").touch()
                checkpoint = train.Checkpoint.from_directory(folder)
                train.report({"n": number}, checkpoint=checkpoint, checkpoint_dir_name="same")

    result = api.fit(f, workers=1)
    files = visible_names(api.scratch / "run/same")
    return [best_metrics(result), files]


@probe
def which_uploads_delete_the_local_copy(api: TrainingApi) -> Any:
    def f(config: dict[str, Any]) -> Any:
        train: Any = import_api(config)
        left = {}
        for mode in ("SYNC", "ASYNC"):
            for delete in (None, True, False):
                folder = tempfile.mkdtemp()
                Path(folder, "file").touch()
                train.report(
                    {},
                    checkpoint=train.Checkpoint.from_directory(folder),
                    checkpoint_upload_mode=train.CheckpointUploadMode[mode],
                    delete_local_checkpoint_after_upload=delete,
                )
                left[f"{mode} {delete}"] = folder
        train.get_all_reported_checkpoints()
        time.sleep(1)  # a local copy is deleted after its upload is reported
        return {key: Path(folder).exists() for key, folder in left.items()}

    return api.fit(f, workers=1).return_value


@probe
def a_checkpoint_that_is_not_uploaded(api: TrainingApi) -> Any:
    def f(config: dict[str, Any]) -> Any:
        train: Any = import_api(config)
        storage = train.get_context().get_storage()
        inside = storage.build_checkpoint_path_from_name("mine")
        Path(inside).mkdir()
        Path(inside, "file").touch()
        mode = train.CheckpointUploadMode.NO_UPLOAD
        train.report({"n": 1}, checkpoint=train.Checkpoint(inside), checkpoint_upload_mode=mode)
        external_checkpoint = train.Checkpoint(tempfile.mkdtemp())
        return known_bases(
            catch(lambda: train.report({}, external_checkpoint, checkpoint_upload_mode=mode))
        )

    result = api.fit(f, workers=1)
    return [result.return_value, result.checkpoint.path.rpartition("/")[2], result.metrics]


@probe
def an_upload_function(api: TrainingApi) -> Any:
    def upload(checkpoint: Any, name: str) -> Any:
        target = Path(os.environ["PROBE_PLACE"], "run", f"{name}-by-hand")
        checkpoint.to_directory(str(target))
        return type(checkpoint)(str(target))

    def f(config: dict[str, Any]) -> None:
        os.environ["PROBE_PLACE"] = config["place"]
        train: Any = import_api(config)
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "file").touch()
            checkpoint = train.Checkpoint.from_directory(folder)
            train.report(
                {}, checkpoint=checkpoint, checkpoint_dir_name="c", checkpoint_upload_fn=upload
            )

    return api.fit(f, workers=1).checkpoint.path.rpartition("/")[2]


@probe
def upload_function_that_returns_no_checkpoint(api: TrainingApi) -> Any:
    def f(config: dict[str, Any]) -> None:
        train: Any = import_api(config)
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = train.Checkpoint.from_directory(folder)
            train.report({}, checkpoint=checkpoint, checkpoint_upload_fn=lambda a, b: 3)

    error: Any = catch(lambda: api.fit(f, workers=1))
    return [known_bases(error), known_bases(error.worker_failures[0])]


@probe
def result_of_get_checkpoint(api: TrainingApi) -> Any:
    def f(config: dict[str, Any]) -> Any:
        train: Any = import_api(config)
        before = train.get_checkpoint()
        report_steps({**config, "metrics": [{"n": 0}]})
        after = train.get_checkpoint()
        return [before, after.path.rpartition("/")[2]]

    return api.fit(f, workers=1).return_value


@probe
def all_reported_checkpoints(api: TrainingApi) -> Any:
    def f(config: dict[str, Any]) -> Any:
        train: Any = import_api(config)
        report_steps({**config, "metrics": [{"score": n} for n in (3, 1, 4, 2)]})
        result = train.get_all_reported_checkpoints()
        return [[one.metrics["score"], one.status.value] for one in result]

    how = checkpoint_config(api, num_to_keep=2, checkpoint_score_attribute="score")
    return api.fit(f, workers=1, **how).return_value


# --- resuming -------------------------------------------------------------------------------------


@probe
def reused_name_resumes(api: TrainingApi) -> Any:
    def f(config: dict[str, Any]) -> Any:
        found = import_api(config).get_checkpoint()
        return found and found.path.rpartition("/")[2]

    first = api.fit(report_steps, config={"metrics": [{"n": 0}, {"n": 1}]})
    second = api.fit(f)
    return [second.return_value, second.metrics, best_metrics(second), first.metrics]


@probe
def failed_attempt_is_retried_from_the_latest_checkpoint(api: TrainingApi) -> Any:
    def f(config: dict[str, Any]) -> Any:
        train: Any = import_api(config)
        found = train.get_checkpoint()
        rank = train.get_context().get_world_rank()
        name = found.path.rpartition("/")[2] if found else "nothing"
        with Path(config["place"], f"attempts{rank}").open("a") as file:
            file.write(f"{name} ")
        if found is None:
            report_steps({**config, "metrics": [{"n": 0}]})
            train.get_all_reported_checkpoints()
            raise RuntimeError("the first attempt")

    api.fit(f, run={"failure_config": api.train.FailureConfig(max_failures=1)})
    return [(api.scratch / f"attempts{rank}").read_text() for rank in range(2)]


@probe
def no_more_attempts_than_allowed(api: TrainingApi) -> Any:
    def f(config: dict[str, Any]) -> None:
        with Path(config["place"], "attempts").open("a") as file:
            file.write("x")
        raise ZeroDivisionError("always")

    how: Any = {"run": {"failure_config": api.train.FailureConfig(max_failures=2)}}
    error = catch(lambda: api.fit(f, workers=1, **how))
    return [known_bases(error), (api.scratch / "attempts").read_text()]


# --- failures -------------------------------------------------------------------------------------


@probe
def an_exception_by_rank(api: TrainingApi) -> Any:
    def f(config: dict[str, Any]) -> None:
        train: Any = import_api(config)
        if train.get_context().get_world_rank() == 1:
            raise ZeroDivisionError("of rank 1")
        train.collective.barrier()

    error: Any = catch(lambda: api.fit(f))
    own = error.worker_failures[1]
    result = "[Rank 1 Error Snippet]:" in str(error), "of rank 1" in str(error)
    return [known_bases(error), known_bases(own), str(own), result]


@probe
def early_exit_with_status_0(api: TrainingApi) -> Any:
    def f() -> None:
        sys.exit(0)

    error: Any = catch(lambda: api.fit(f, workers=1))
    return [known_bases(error), known_bases(error.worker_failures[0])]


@probe
def killed_worker(api: TrainingApi) -> Any:
    def f() -> None:
        time.sleep(3)  # an immediate exit is another probe
        os._exit(3)

    error: Any = catch(lambda: api.fit(f, workers=1))
    return [known_bases(error), list(error.worker_failures)]


@probe
def worker_that_exits_immediately(api: TrainingApi) -> Any:
    def f(config: dict[str, Any]) -> None:
        with Path(config["place"], "attempts").open("a") as file:
            file.write("x")
        os._exit(3)

    how: Any = {"run": {"failure_config": api.train.FailureConfig(max_failures=1)}}
    error = catch(lambda: api.fit(f, workers=1, **how))
    return [known_bases(error), (api.scratch / "attempts").read_text()]


@probe
def storage_that_cannot_be_written(api: TrainingApi) -> Any:
    def f() -> None: ...

    file = api.scratch / "file"
    file.touch()
    error = catch(lambda: api.fit(f, run={"storage_path": str(file)}))
    return "TrainingFailedError" in known_bases(error)["is"]


# --- callbacks ------------------------------------------------------------------------------------


def recording_callback(api: TrainingApi) -> Any:
    place = str(api.scratch)

    class RecordingCallback(api.train.UserCallback):  # type: ignore[name-defined,misc]
        def after_report(self, run_context: Any, metrics: Any, checkpoint: Any) -> None:
            name = checkpoint and checkpoint.path.rpartition("/")[2]
            self._write(["report", run_context.get_run_config().name, metrics, name])

        def after_exception(self, run_context: Any, worker_exceptions: Any) -> None:
            # Which rank fails first is random; the exception is not.
            self._write(["exception", sorted({str(one) for one in worker_exceptions.values()})])

        def _write(self, event: Any) -> None:
            with Path(place, "calls").open("a") as file:
                file.write(json.dumps(event) + "\n")

    return RecordingCallback()


@probe
def calls_of_callbacks(api: TrainingApi) -> Any:
    def f(config: dict[str, Any]) -> None:
        train: Any = import_api(config)
        train.report({"rank": train.get_context().get_world_rank()})
        report_steps({**config, "metrics": [{"n": 0}]})
        train.get_all_reported_checkpoints()
        raise RuntimeError("at the end")

    catch(lambda: api.fit(f, run={"callbacks": [recording_callback(api)]}))
    result = (api.scratch / "calls").read_text().splitlines()
    return [json.loads(line) for line in result]


@probe
def a_callback_that_raises(api: TrainingApi) -> Any:
    class Broken(api.train.UserCallback):  # type: ignore[name-defined,misc]
        def after_report(self, run_context: Any, metrics: Any, checkpoint: Any) -> None:
            raise ZeroDivisionError("in a callback")

    def f(config: dict[str, Any]) -> None:
        with Path(config["place"], "attempts").open("a") as file:
            file.write("x")
        train: Any = import_api(config)
        train.report({})
        train.collective.barrier()

    failures = api.train.FailureConfig(max_failures=3)
    how: Any = {"run": {"callbacks": [Broken()], "failure_config": failures}}
    error: Any = catch(lambda: api.fit(f, workers=1, **how))
    return [
        known_bases(error),
        known_bases(error.controller_failure),
        (api.scratch / "attempts").read_text(),
    ]


# --- backends -------------------------------------------------------------------------------------


def recording_backend_config(api: TrainingApi, *, raising: bool = False) -> Any:
    """A backend config whose backend and context record their calls."""
    place = str(api.scratch)
    home = importlib.import_module(f"{api.name}.backend")

    def note(event: Any) -> None:
        with Path(place, "notes").open("a") as file:
            file.write(json.dumps(event) + "\n")

    class RecordingBackend(home.Backend):  # type: ignore[name-defined,misc]
        def on_start(self, worker_group: Any, backend_config: Any) -> None:
            if raising:
                raise ZeroDivisionError("in a hook")
            squares = worker_group.execute(lambda number, more: number**2 + more, 3, more=1)
            alone = worker_group.execute_single(1, lambda: "of rank 1")
            note(["on_start", len(worker_group), squares, alone, type(backend_config).__name__])

        def on_training_start(self, worker_group: Any, backend_config: Any) -> None:
            note(["on_training_start", len(worker_group)])

        def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
            note(["on_shutdown"])

    class NotingConfig(api.train.BackendConfig):  # type: ignore[name-defined,misc]
        @property
        def backend_cls(self) -> Any:
            return RecordingBackend

        @property
        def train_func_context(self) -> Any:
            @contextmanager
            def around() -> Iterator[None]:
                os.environ["PROBE_CONTEXT"] = "entered"
                yield

            return around

    return NotingConfig()


@probe
def the_hooks_of_a_backend(api: TrainingApi) -> Any:
    def f() -> Any:
        return os.environ.get("PROBE_CONTEXT")

    result = api.fit(f, backend_config=recording_backend_config(api))
    output = (api.scratch / "notes").read_text().splitlines()
    return [result.return_value, [json.loads(line) for line in output]]


@probe
def a_hook_that_raises(api: TrainingApi) -> Any:
    def f() -> None: ...

    how: Any = {"run": {"failure_config": api.train.FailureConfig(max_failures=3)}}
    error: Any = catch(
        lambda: api.fit(f, backend_config=recording_backend_config(api, raising=True), **how)
    )
    return [known_bases(error), known_bases(error.controller_failure)]


# --- validation -----------------------------------------------------------------------------------


@probe
def checkpoints_that_are_validated(api: TrainingApi) -> Any:
    def validate(checkpoint: Any, offset: int = 0) -> Any:
        with checkpoint.as_directory() as folder:
            number = int(Path(folder, "rank0").read_text())
        if number == 2:
            raise ValueError("the third is bad")
        return {"score": offset + number}

    def f(config: dict[str, Any]) -> Any:
        train: Any = import_api(config)
        task = train.ValidationTaskConfig(fn_kwargs={"offset": 100})
        for number, validation in enumerate([True, task, True, False]):
            with tempfile.TemporaryDirectory() as folder:
                Path(folder, "rank0").write_text(f"{number}")
                checkpoint = train.Checkpoint.from_directory(folder)
                train.report({"n": number}, checkpoint=checkpoint, validation=validation)
        output = train.get_all_reported_checkpoints()
        return [[one.metrics, one.status.value] for one in output]

    task_config = api.train.ValidationTaskConfig(fn_kwargs={"offset": 10})
    config = api.train.ValidationConfig(validate, task_config=task_config)
    result = api.fit(f, workers=1, validation_config=config)
    return [result.return_value, best_metrics(result)]


@probe
def a_validation_that_takes_too_long(api: TrainingApi) -> Any:
    def validate(checkpoint: Any) -> Any:
        time.sleep(600)

    def f(config: dict[str, Any]) -> Any:
        train: Any = import_api(config)
        checkpoint = train.Checkpoint.from_directory(tempfile.mkdtemp())
        train.report({"n": 1}, checkpoint=checkpoint, validation=True)
        committed = train.CheckpointConsistencyMode.COMMITTED
        soon = train.get_all_reported_checkpoints(consistency_mode=committed)
        late = train.get_all_reported_checkpoints()
        return [one.status.value for one in (*soon, *late)]

    task_config = api.train.ValidationTaskConfig(timeout_s=5)
    config = api.train.ValidationConfig(validate, task_config=task_config)
    result = api.fit(f, workers=1, validation_config=config)
    return [result.return_value, best_metrics(result)]


@probe
def unsupported_validations(api: TrainingApi) -> Any:
    def f(config: dict[str, Any]) -> Any:
        train: Any = import_api(config)
        checkpoint = train.Checkpoint.from_directory(tempfile.mkdtemp())
        without_config = catch(lambda: train.report({}, checkpoint, validation=True))
        without_checkpoint = catch(lambda: train.report({}, validation=True))
        return [known_bases(without_config), known_bases(without_checkpoint)]

    return api.fit(f, workers=1).return_value


# --- torch ----------------------------------------------------------------------------------------


@probe
def prepared_torch_objects(api: TrainingApi) -> Any:
    def f(config: dict[str, Any]) -> Any:
        import torch
        import torch.distributed as dist
        from torch.utils.data import DataLoader, RandomSampler, TensorDataset

        torch_api: Any = importlib.import_module(f"{config['api']}.torch")
        model = torch_api.prepare_model(torch.nn.Linear(1, 1))
        bare = torch_api.prepare_model(torch.nn.Linear(1, 1), parallel_strategy=None)
        data = TensorDataset(torch.arange(10))
        loader = torch_api.prepare_data_loader(DataLoader(data, batch_size=2))
        shuffled = torch_api.prepare_data_loader(DataLoader(data, sampler=RandomSampler(data)))
        return [
            type(model).__name__,
            type(bare).__name__,
            [dist.get_backend(), dist.get_world_size()],
            [isinstance(loader, DataLoader), loader.batch_size, len(loader)],
            [type(loader.sampler).__name__, loader.sampler.shuffle, shuffled.sampler.shuffle],
            [batch[0].tolist() for batch in loader],
            [str(torch_api.get_device()), [str(one) for one in torch_api.get_devices()]],
            sorted(name for name in os.environ if name in TORCH_VARIABLES),
        ]

    result = api.fit(f, torch=True)
    return result.return_value


TORCH_VARIABLES = (
    "ACCELERATE_TORCH_DEVICE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "NODE_RANK", "RANK", "WORLD_SIZE",
)  # fmt: skip


@probe
def one_torch_worker_alone(api: TrainingApi) -> Any:
    def f(config: dict[str, Any]) -> Any:
        import torch
        import torch.distributed as dist

        torch_api: Any = importlib.import_module(f"{config['api']}.torch")
        return [
            type(torch_api.prepare_model(torch.nn.Linear(1, 1))).__name__,
            dist.get_world_size(),
        ]

    return api.fit(f, workers=1, torch=True).return_value


# --- collectives ----------------------------------------------------------------------------------


@probe
def a_broadcast(api: TrainingApi) -> Any:
    def f(config: dict[str, Any]) -> Any:
        train: Any = import_api(config)
        rank = train.get_context().get_world_rank()
        collective: Any = importlib.import_module(f"{config['api']}.collective")
        collective.barrier()
        result = collective.broadcast_from_rank_zero(rank)
        Path(config["place"], f"result{rank}").write_text(str(result))

    api.fit(f)
    return [(api.scratch / f"result{rank}").read_text() for rank in range(2)]


# --- invalid input --------------------------------------------------------------------------------


@probe
def outside_of_a_worker(api: TrainingApi) -> Any:
    train, torch = api.train, api.torch
    collective = importlib.import_module(f"{api.name}.collective")
    calls = {
        "report": lambda: train.report({}),
        "get_checkpoint": train.get_checkpoint,
        "get_all_reported_checkpoints": train.get_all_reported_checkpoints,
        "get_preemption_info": train.get_preemption_info,
        "barrier": collective.barrier,
        "broadcast_from_rank_zero": lambda: collective.broadcast_from_rank_zero(1),
        "get_device": torch.get_device,
        "get_devices": torch.get_devices,
    }
    return {name: known_bases(catch(call)) for name, call in calls.items()}


@probe
def invalid_configurations(api: TrainingApi) -> Any:
    train, trainer = api.train, api.trainer
    calls: dict[str, Callable[[], Any]] = {
        "workers as a list": lambda: train.ScalingConfig(num_workers=[1, 2]),
        "workers below 0": lambda: train.ScalingConfig(num_workers=-1),
        "more at least than at most": lambda: train.ScalingConfig(num_workers=(3, 2)),
        "a range of one": lambda: train.ScalingConfig(num_workers=(2, 2)),
        "trainer_resources": lambda: train.ScalingConfig(trainer_resources={}),
        "an interval below 0": lambda: train.ScalingConfig(elastic_resize_monitor_interval_s=-1),
        "GPUs unasked": lambda: train.ScalingConfig(resources_per_worker={"GPU": 1}),
        "no GPUs though asked": lambda: train.ScalingConfig(
            use_gpu=True, resources_per_worker={"GPU": 0}
        ),
        "GPUs and TPUs": lambda: train.ScalingConfig(use_gpu=True, use_tpu=True),
        "labels for too few": lambda: train.ScalingConfig(num_workers=2, label_selector=[{}]),
        "to keep none": lambda: train.CheckpointConfig(num_to_keep=0),
        "another order": lambda: train.CheckpointConfig(checkpoint_score_order="up"),
        "checkpoint_frequency": lambda: train.CheckpointConfig(checkpoint_frequency=1),
        "checkpoint_at_end": lambda: train.CheckpointConfig(checkpoint_at_end=True),
        "fail_fast": lambda: train.FailureConfig(fail_fast=True),
        "sync_config": lambda: train.RunConfig(sync_config=train.SyncConfig()),
        "verbose": lambda: train.RunConfig(verbose=1),
        "stop": lambda: train.RunConfig(stop={}),
        "progress_reporter": lambda: train.RunConfig(progress_reporter=1),
        "log_to_file": lambda: train.RunConfig(log_to_file=True),
        "a callback that is none": lambda: train.RunConfig(callbacks=[3]),
        "a failure config that is none": lambda: train.RunConfig(failure_config=3),
        "no log level": lambda: train.LoggingConfig(log_level="loud"),
        "a log level in any case": lambda: train.LoggingConfig(log_level="debug"),
        "datasets to split": lambda: train.DataConfig(datasets_to_split="some"),
        "a second nameless argument": lambda: trainer(print, {}),
        "metadata": lambda: trainer(print, metadata={}),
        "resume_from_checkpoint": lambda: trainer(
            print, resume_from_checkpoint=train.Checkpoint(UNUSED_PATH)
        ),
        "restore": lambda: trainer.restore(UNUSED_PATH),
        "can_restore": lambda: trainer.can_restore(UNUSED_PATH),
        "accelerate": lambda: api.torch.accelerate(),
        "backward": lambda: api.torch.backward(None),
        "prepare_optimizer": lambda: api.torch.prepare_optimizer(None),
    }
    return {name: known_bases(catch(call)) for name, call in calls.items()}


@probe
def elastic_group_with_minimum_0(api: TrainingApi) -> Any:
    return known_bases(catch(lambda: api.train.ScalingConfig(num_workers=(0, 2))))


@probe
def no_time_to_validate(api: TrainingApi) -> Any:
    return known_bases(catch(lambda: api.train.ValidationTaskConfig(timeout_s=0)))


@probe
def resources_of_configurations(api: TrainingApi) -> Any:
    scaling = api.train.ScalingConfig
    made = [
        scaling(),
        scaling(num_workers=3, use_gpu=True),
        scaling(num_workers=2, resources_per_worker={"CPU": 4, "GPU": 0}),
        scaling(num_workers=2, use_gpu=True, resources_per_worker={"CPU": 4}),
        scaling(num_workers=(1, 4), use_gpu=True, accelerator_type="A100"),
    ]
    return [
        [one.total_resources, one.num_cpus_per_worker, one.num_gpus_per_worker,
         one.additional_resources_per_worker, one.min_workers, one.max_workers,
         one.elasticity_enabled]
        for one in made
    ]  # fmt: skip


@probe
def checkpoint_objects(api: TrainingApi) -> Any:
    kind = api.train.Checkpoint
    folder = api.scratch / "folder"
    folder.mkdir()
    (folder / "file").touch()
    one = kind.from_directory(str(folder))
    one.set_metadata({"a": 1})
    one.update_metadata({"b": 2})
    with one.as_directory() as same:
        pass
    copied = one.to_directory()
    again = one.to_directory()
    return [
        one.get_metadata(),
        same == str(folder),
        [copied == str(folder), copied == again, visible_names(copied)],
        repr(one) == f"Checkpoint(filesystem=local, path={folder})",
        type(one.filesystem).__name__,
        [
            known_bases(catch(lambda: kind("relative/path"))),
            known_bases(catch(lambda: os.fspath(one))),
        ],
        [
            known_bases(catch(lambda name=name: getattr(one, name)))  # type: ignore[misc]
            for name in ("from_dict", "to_dict", "to_bytes", "uri", "get_preprocessor")
        ],
    ]


@probe
def missing_results(api: TrainingApi) -> Any:
    kind = api.train.Result
    bare = kind(metrics=None, checkpoint=None, error=None, path=UNUSED_PATH, best_checkpoints=[])
    pair = (api.train.Checkpoint(UNUSED_PATH), {"loss": 1})
    one = kind(pair[1], None, None, UNUSED_PATH, best_checkpoints=[pair])
    return [
        known_bases(catch(lambda: kind.from_path(str(api.scratch / "nothing")))),
        known_bases(catch(lambda: kind.from_path(str(api.scratch)))),
        known_bases(catch(lambda: bare.get_best_checkpoint("loss", "max"))),
        known_bases(catch(lambda: one.get_best_checkpoint("other", "max"))),
        known_bases(catch(lambda: one.get_best_checkpoint("loss", "up"))),
        one.get_best_checkpoint("loss", "min") is pair[0],
        known_bases(catch(lambda: one.config)),
    ]


@probe
def a_collective_that_takes_too_long(api: TrainingApi) -> Any:
    def f(config: dict[str, Any]) -> None:
        if import_api(config).get_context().get_world_rank() == 1:
            time.sleep(30)
        importlib.import_module(f"{config['api']}.collective").barrier()

    os.environ["RAY_TRAIN_COLLECTIVE_TIMEOUT_S"] = "2"  # received by both
    error: Any = catch(lambda: api.fit(f))
    del os.environ["RAY_TRAIN_COLLECTIVE_TIMEOUT_S"]
    result = str(error)
    return [known_bases(error), list(error.worker_failures), "timed out" in result, "[1]" in result]


# --- placement and size ---------------------------------------------------------------------------


@probe
def variables_of_the_workers(api: TrainingApi) -> Any:
    def f() -> Any:
        return os.environ["PROBE_VARIABLE"]

    runtime_env = {"env_vars": {"PROBE_VARIABLE": "given"}}
    return api.fit(f, run={"worker_runtime_env": runtime_env}).return_value


@probe
def elastic_group_starts_with_available_resources(api: TrainingApi) -> Any:
    def f(config: dict[str, Any]) -> Any:
        return import_api(config).get_context().get_world_size()

    return [api.fit(f, workers=(1, 2)).return_value, api.fit(f, workers=(2, 2)).return_value]


@probe
def a_file_system_of_pyarrow(api: TrainingApi) -> Any:
    from pyarrow.fs import LocalFileSystem, SubTreeFileSystem

    filesystem = SubTreeFileSystem(str(api.scratch), LocalFileSystem())
    run = {"storage_path": "runs", "storage_filesystem": filesystem}
    result = api.fit(report_steps, workers=1, run=run, config={"metrics": [{"n": 1}]})
    again = api.train.Result.from_path("runs/run", storage_filesystem=filesystem)
    with again.checkpoint.as_directory() as folder:
        files = visible_names(folder)
    return [result.path, result.checkpoint.path, again.metrics, files]


@probe
def a_background_upload_that_fails(api: TrainingApi) -> Any:
    def upload(checkpoint: Any, name: str) -> Any:
        raise ZeroDivisionError("while uploading")

    def f(config: dict[str, Any]) -> None:
        train: Any = import_api(config)
        checkpoint = train.Checkpoint.from_directory(tempfile.mkdtemp())
        mode = train.CheckpointUploadMode.ASYNC
        train.report({}, checkpoint, checkpoint_upload_mode=mode, checkpoint_upload_fn=upload)
        time.sleep(60)

    began = time.monotonic()
    error: Any = catch(lambda: api.fit(f, workers=1))
    at_once = time.monotonic() - began < 50
    return [known_bases(error), known_bases(error.worker_failures[0]), at_once]


# --- last, because Ray remains in local mode ------------------------------------------------------


@probe
def local_mode(api: TrainingApi) -> Any:
    def f(config: dict[str, Any]) -> Any:
        train: Any = import_api(config)
        train.report({"loss": 2})
        collective: Any = importlib.import_module(f"{config['api']}.collective")
        collective.barrier()
        output = collective.broadcast_from_rank_zero(7)
        sizes = train.get_context().get_world_size(), train.get_context().get_world_rank()
        return [output, sizes, train.get_all_reported_checkpoints(), os.getpid()]

    def raises() -> None:
        raise ZeroDivisionError("here")

    result = api.fit(f, workers=0)
    same_process = result.return_value.pop() == os.getpid()
    error = known_bases(catch(lambda: api.fit(raises, workers=0)))
    return [result.return_value, same_process, result.metrics, result.path, error]


@probe
def a_checkpoint_in_local_mode(api: TrainingApi) -> Any:
    def f(config: dict[str, Any]) -> Any:
        train: Any = import_api(config)
        folder = tempfile.mkdtemp()
        train.report({"loss": 1}, checkpoint=train.Checkpoint.from_directory(folder))
        first = train.get_checkpoint()
        train.report({"loss": 2})
        second = train.get_checkpoint()
        return [one is not None and one.path == folder for one in (first, second)]

    return api.fit(f, workers=0).return_value


@probe
def invalid_calls_in_local_mode(api: TrainingApi) -> Any:
    def f(config: dict[str, Any]) -> Any:
        train: Any = import_api(config)
        data = train.get_dataset_shard("known") == [1, 2]
        unknown = known_bases(catch(lambda: train.get_dataset_shard("unknown")))
        return [data, unknown, known_bases(catch(train.get_context().get_storage))]

    return api.fit(f, workers=0, datasets={"known": lambda: [1, 2]}).return_value


# --- datasets, as in the guides of Ray Train and Ray Data -----------------------------------------


INGEST_ROWS = 64


def csv_rows(api: TrainingApi) -> Any:
    """Return a dataset of 64 rows with the columns x and y in four files."""
    folder = api.scratch / "csv"
    folder.mkdir()
    for first in range(0, INGEST_ROWS, 16):
        lines = [f"{number},{number % 2}" for number in range(first, first + 16)]
        (folder / f"{first:02d}.csv").write_text("\n".join(["x,y", *lines]))
    return api.data.read_csv(str(folder))


def halve(batch: dict[str, Any]) -> dict[str, Any]:
    return {"x": batch["x"] / 2, "y": batch["y"]}


def write_rows_by_epoch(config: dict[str, Any]) -> None:
    """Iterate over the shards of all datasets twice; write the values of x and the dtype."""
    train: Any = import_api(config)
    seen: dict[str, Any] = {}
    for name in config["datasets"]:
        shard = train.get_dataset_shard(name)
        epochs = []
        for _ in range(2):
            batches = list(shard.iter_torch_batches(batch_size=8))
            epochs.append([float(value) for batch in batches for value in batch["x"]])
            seen[f"dtypes of {name}"] = sorted({str(batch["x"].dtype) for batch in batches})
        seen[name] = epochs
    rank = train.get_context().get_world_rank()
    Path(config["place"], f"rows{rank}").write_text(json.dumps(seen))
    train.report({"epochs": 2})


def fit_on(api: TrainingApi, datasets: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    """Train with two workers; return what each has written."""
    config = {"datasets": sorted(datasets)}
    api.fit(write_rows_by_epoch, workers=2, datasets=datasets, config=config, **options)
    return [json.loads((api.scratch / f"rows{rank}").read_text()) for rank in range(2)]


@probe
def batches_of_a_transformed_dataset_in_two_epochs(api: TrainingApi) -> Any:
    workers = fit_on(api, {"train": csv_rows(api).map_batches(halve)})
    rows = [sorted(row for one in workers for row in one["train"][epoch]) for epoch in range(2)]
    expected = [number / 2 for number in range(INGEST_ROWS)]
    sizes = [[len(epoch) for epoch in one["train"]] for one in workers]
    return [rows == [expected, expected], sizes, workers[0]["dtypes of train"]]


@probe
def only_the_training_rows_are_split(api: TrainingApi) -> Any:
    rows = csv_rows(api)
    train, valid = rows.train_test_split(0.25)
    config = api.train.DataConfig(datasets_to_split=["train"])
    workers = fit_on(api, {"train": train, "valid": valid}, dataset_config=config)
    trained = sorted(row for one in workers for row in one["train"][0])
    validated = [sorted(one["valid"][0]) for one in workers]
    # Which rows are in the parts depends on the order in which Ray has read the files.
    all_rows = sorted([*trained, *validated[0]]) == [float(n) for n in range(INGEST_ROWS)]
    return [len(trained), [len(part) for part in validated], validated[0] == validated[1], all_rows]


@probe
def rows_are_shuffled_in_each_epoch(api: TrainingApi) -> Any:
    workers = fit_on(api, {"train": csv_rows(api).materialize().random_shuffle()})
    epochs = [[row for one in workers for row in one["train"][epoch]] for epoch in range(2)]
    first, second = epochs
    is_every_row = sorted(first) == sorted(second) == [float(n) for n in range(INGEST_ROWS)]
    return [first == second, first == sorted(first), second == sorted(second), is_every_row]


@probe
def rows_of_a_fitted_preprocessor(api: TrainingApi) -> Any:
    preprocessors = importlib.import_module(f"{api.data.__name__}.preprocessors")
    scaled = preprocessors.MinMaxScaler(["x"]).fit_transform(csv_rows(api)).materialize()
    workers = fit_on(api, {"train": scaled})
    values = sorted(row for one in workers for row in one["train"][1])
    return [scaled.count(), round(values[0], 6), round(values[1], 6), round(values[-1], 6)]


@probe
def parts_of_a_streaming_split(api: TrainingApi) -> Any:
    parts = csv_rows(api).streaming_split(2, equal=True)
    # In threads: each pass begins when all parts are read.
    with ThreadPoolExecutor(2) as pool:
        rows = list(pool.map(lambda part: [row["x"] for row in part.iter_rows()], parts))
    return [[len(part) for part in rows], sorted(rows[0] + rows[1]) == list(range(INGEST_ROWS))]


def main() -> None:
    name, scratch, *chosen = sys.argv[1:]
    if name == "ray.train":
        start_ray(attempts=5)
    seen = {}
    for number, (what, run_probe) in enumerate(PROBES.items()):
        if chosen and what not in chosen:
            continue
        place = Path(scratch, str(number))
        place.mkdir(parents=True)
        began = time.monotonic()
        try:
            seen[what] = json.loads(json.dumps(run_probe(TrainingApi(name, place))))
        except Exception as error:  # noqa: BLE001 - returned as the result of this side
            seen[what] = f"probe failed: {error!r}"
        print(f"{what} {time.monotonic() - began:.1f} s", flush=True)
        lines = (f" {json.dumps(key)}: {json.dumps(value)}" for key, value in seen.items())
        Path(scratch, "seen.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


def start_ray(attempts: int) -> None:
    """Its own timeout is 30 seconds, too short on a busy machine."""
    ray = importlib.import_module("ray")
    try:
        ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
    except Exception:  # it raises nothing narrower
        if attempts == 1:
            raise
        ray.shutdown()
        start_ray(attempts - 1)


if __name__ == "__main__":
    main()
