"""The trainers: `DataParallelTrainer` and `TorchTrainer`. They validate and store arguments.

Everything that `fit()` needs beyond that is imported when it is called, in parallel to the
prewarming of the backend.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from spotfit.client.preload import find_preload_modules
from spotfit.client.request import FitRequest, prewarm_backend
from spotfit.client.run_config import RunConfig, check_config_type, qualified_type_name
from spotfit.client.trainer_datasets import check_datasets, check_names
from spotfit.core.errors import ConfigError, ConfigTypeError
from spotfit.core.input_checks import (
    ErrorCollector,
    reject_deprecated_arguments,
    suggest_keywords,
)
from spotfit.data.data_config import DataConfig
from spotfit.data.feeders import Feeders
from spotfit.frameworks.backend_config import BackendConfig
from spotfit.frameworks.torch.torch_config import TorchConfig
from spotfit.model.config import ScalingConfig
from spotfit.model.validation_config import ValidationConfig

if TYPE_CHECKING:
    from datetime import datetime
    from os import PathLike

    from spotfit.client.estimate import Estimate
    from spotfit.client.estimate_run import Duration
    from spotfit.client.result import Result
    from spotfit.client.run_handle import RunHandle
    from spotfit.provision.profile import ProvisionerOptions

_REMOVED_ARGUMENTS = {
    "resume_from_checkpoint": "call fit() with the same name and storage_path to continue a run, "
    "or pass the checkpoint of another run in train_loop_config",
    "metadata": "pass it in train_loop_config",
}


@suggest_keywords
class DataParallelTrainer:
    """Runs a training function on several workers in parallel.

    `train_loop_per_worker` takes `train_loop_config` as its argument, or no argument.
    `provisioner` selects the backend that provides machines: a name, a string such as
    'local?nodes=2', or an options object; a list of them combines several backends, of which the
    cheapest machines are chosen. The default is SPOTFIT_PROVISIONER, else the profile in
    spotfit.toml, else 'local' (this machine). `data_feeders` are processes and machines that
    transform the datasets; without them, the workers do.
    Raises `ConfigError` or `ConfigErrors` for invalid arguments.
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any],
        *,
        train_loop_config: dict[str, Any] | None = None,
        backend_config: Any = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        datasets: dict[str, Any] | None = None,
        dataset_config: Any = None,
        data_feeders: Feeders | None = None,
        resume_from_checkpoint: Any = None,
        metadata: dict[str, Any] | None = None,
        validation_config: ValidationConfig | None = None,
        provisioner: str | ProvisionerOptions | list[str | ProvisionerOptions] | None = None,
    ) -> None:
        reject_deprecated_arguments(
            type(self).__name__,
            {"resume_from_checkpoint": resume_from_checkpoint, "metadata": metadata},
            replacements=_REMOVED_ARGUMENTS,
            unset=None,  # their default in Ray's signature
        )
        errors = ErrorCollector()

        def check(name: str, value: Any, expected_type: type[Any]) -> Any:
            return errors.check(partial(check_config_type, name, value, expected_type))

        scaling = check("scaling_config", scaling_config, ScalingConfig)
        run = check("run_config", run_config, RunConfig)
        data = check("dataset_config", dataset_config, DataConfig)
        backend = check("backend_config", backend_config, BackendConfig)
        if scaling is not None:
            errors.check(lambda: check_datasets(datasets, num_workers=scaling.num_workers))
        if data is not None and isinstance(datasets, Mapping):
            errors.check(lambda: check_names(data, datasets))
        errors.check(lambda: _check_loop_config(train_loop_config))
        if data_feeders is not None:
            check("data_feeders", data_feeders, Feeders)
        if validation_config is not None:
            check("validation_config", validation_config, ValidationConfig)
        errors.raise_all()
        self.train_loop_per_worker = train_loop_per_worker
        self.train_loop_config = train_loop_config
        self.backend_config: BackendConfig = backend
        self.scaling_config: ScalingConfig = scaling
        self.run_config: RunConfig = run
        self.datasets = dict(datasets or {})  # a copy: the caller's dictionary may change
        self.dataset_config: DataConfig = data
        self.data_feeders = data_feeders
        self.validation_config = validation_config
        self.provisioner = provisioner

    def fit(self, *, confirm: float | None = None) -> Result:
        """Train to the end and return the result. Blocks, and prints the output of the workers.

        A run with the same name and storage_path is continued, or followed if it is active. Raises
        `ConfigError`, `ShippingError`, `StoreError` or `RunActiveError` before any machine is
        requested, `TrainingFailedError` if training fails, and `RunCancelledError` if another
        process cancels the run. Ctrl-C cancels it and raises KeyboardInterrupt. With num_workers=0
        the function is called in this process, and its exceptions propagate unchanged.

        With `confirm`, a number of US dollars, a terminal shows the estimate and asks before
        machines are rented, if they may cost more in the worst case; it needs the training time of
        `estimate()`. Raises `RunCancelledError` if that is declined. Never asks without a terminal.
        """
        if self.scaling_config.num_workers == 0:
            return self._fit_locally()
        request = self._build_request()
        if confirm is not None:
            from spotfit.client.estimate_run import confirm_cost

            confirm_cost(request, confirm)
        with prewarm_backend(request):
            # Imported here because it takes a while: the backend prewarms meanwhile.
            from spotfit.client import fit

            handle = fit.start_run(request, show_output=True)
        return fit.wait_for_result(handle)

    def submit(self) -> RunHandle:
        """Start training and return a handle without waiting. This process may exit afterwards.

        Requests the first machines before it returns. Raises the errors that `fit()` raises before
        machines are requested, and `ConfigError` with num_workers=0.
        """
        if self.scaling_config.num_workers == 0:
            raise ConfigError(
                "submit() is not supported with ScalingConfig(num_workers=0), which trains in the "
                "process that calls fit().",
                do="Call fit(), or set num_workers to at least 1.",
            )
        request = self._build_request()
        with prewarm_backend(request):
            from spotfit.client import fit

            return fit.submit(request)

    def estimate(
        self,
        *,
        training_time: Duration | None = None,
        deadline: Duration | datetime | None = None,
        budget_usd: float | None = None,
        changeover: Duration | None = None,
        restart: Duration | None = None,
        recordings: str | PathLike[str] | None = None,
    ) -> Estimate:
        """Return expected cost, duration and the guarantee of the deadline. Rents nothing.

        Lists the offers of the backend with their prices, and replays recorded spot markets with
        the policy that schedules runs. `training_time` is the duration with all workers if no
        machine is lost. It, `deadline` and `budget_usd` replace those of `RunConfig`. `changeover`
        is the time from a loss to new progress, by default that of the backend. `restart` is how
        long machines that leave or join an elastic group interrupt it, by default two minutes.
        `recordings` is a folder of other recorded markets, whose outages and lifetimes then apply.
        Raises `ConfigError`.
        """
        if self.scaling_config.num_workers == 0:
            raise ConfigError(
                "estimate() is not supported with ScalingConfig(num_workers=0), which rents no "
                "machines.",
                do="Set num_workers to at least 1.",
            )
        from spotfit.client.estimate_run import estimate_request

        settings = {
            "training_time_s": training_time,
            "deadline": deadline,
            "budget_usd": budget_usd,
        }
        return estimate_request(
            self._build_request(),
            settings,
            changeover=changeover,
            restart=restart,
            recordings=recordings,
        )

    # Class methods of Ray's trainers: scripts that call them get an explanation.

    @classmethod
    def restore(cls, *_args: Any, **_kwargs: Any) -> Any:
        """Removed, as in Ray Train V2: `fit()` continues a run. Raises `DeprecationWarning`."""
        raise DeprecationWarning(
            "restore() is no longer supported. Instead, call fit() with the same name and "
            "storage_path, which continues the run from its latest checkpoint."
        )

    @classmethod
    def can_restore(cls, *_args: Any, **_kwargs: Any) -> bool:
        """Removed, as in Ray Train V2: `fit()` continues a run. Raises `DeprecationWarning`."""
        raise DeprecationWarning(
            "can_restore() is no longer supported. Instead, call fit() with the same name and "
            "storage_path, which continues the run if there is one."
        )

    def _build_request(self) -> FitRequest:
        name, options = self.backend_config.framework_options(self.scaling_config)
        return FitRequest(
            fn=self.train_loop_per_worker,
            config=self.train_loop_config,
            scaling=self.scaling_config,
            run=self.run_config,
            framework=name,
            framework_options=options,
            backend_config=self.backend_config,
            provisioner=self.provisioner,
            datasets=self.datasets,
            dataset_config=self.dataset_config,
            data_feeders=self.data_feeders,
            validation=self.validation_config,
            preload=self._preload_modules(name),
        )

    def _preload_modules(self, framework: str) -> tuple[str, ...]:
        named = self.run_config.preload
        if named is None:
            return ()
        used = find_preload_modules(
            self.train_loop_per_worker, self.train_loop_config, framework=framework
        )
        return tuple(dict.fromkeys((*named, *used)))

    def _fit_locally(self) -> Result:
        from spotfit.client.fit import fit_locally

        return fit_locally(self._build_request())


def _check_loop_config(config: Any) -> None:
    if config is None or isinstance(config, Mapping):
        return
    raise ConfigTypeError(
        "The trainer's train_loop_config= must be a dictionary, not "
        f"{qualified_type_name(config)}.",
        do="Write train_loop_config={'lr': 0.1}; for an argparse.Namespace, vars(args).",
    )


@suggest_keywords
class TorchTrainer(DataParallelTrainer):
    """Runs a training function on workers that form a `torch.distributed` process group.

    If `torch_config.backend` is None, it is set to "nccl" or "gloo" in the object that was passed.
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any],
        *,
        train_loop_config: dict[str, Any] | None = None,
        torch_config: TorchConfig | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        datasets: dict[str, Any] | None = None,
        dataset_config: Any = None,
        data_feeders: Feeders | None = None,
        validation_config: ValidationConfig | None = None,
        metadata: dict[str, Any] | None = None,
        resume_from_checkpoint: Any = None,
        provisioner: str | ProvisionerOptions | list[str | ProvisionerOptions] | None = None,
    ) -> None:
        torch_config = check_config_type(
            "torch_config", torch_config, TorchConfig, module="spotfit.torch"
        )
        super().__init__(
            train_loop_per_worker,
            train_loop_config=train_loop_config,
            backend_config=torch_config,
            scaling_config=scaling_config,
            run_config=run_config,
            datasets=datasets,
            dataset_config=dataset_config,
            data_feeders=data_feeders,
            resume_from_checkpoint=resume_from_checkpoint,
            metadata=metadata,
            validation_config=validation_config,
            provisioner=provisioner,
        )
        # Resolved here, because it depends on use_gpu of the scaling configuration.
        torch_config.backend = torch_config.backend_for(self.scaling_config)

    def _fit_locally(self) -> Result:
        """Train in this process, in the process group of a launcher such as torchrun, if any."""
        from spotfit.client.fit import fit_locally
        from spotfit.frameworks.torch.torchrun_group import join_launcher_group

        assert isinstance(self.backend_config, TorchConfig)
        return fit_locally(self._build_request(), partial(join_launcher_group, self.backend_config))
