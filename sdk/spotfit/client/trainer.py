"""DataParallelTrainer: what to train, how wide, and where; `fit()` does the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from spotfit.client.backend import warmed
from spotfit.client.config import RunConfig, kind_of, typed
from spotfit.client.request import FitRequest
from spotfit.core.deprecated import refuse_deprecated
from spotfit.core.errors import ConfigError
from spotfit.core.mistakes import Mistakes
from spotfit.frameworks.config import BackendConfig
from spotfit.model.config import ScalingConfig
from spotfit.model.data import DataConfig, no_datasets_on_workers
from spotfit.model.validation import ValidationConfig

if TYPE_CHECKING:
    from spotfit.client.handle import RunHandle
    from spotfit.client.result import Result

_INSTEAD = {
    "resume_from_checkpoint": "fit() with the same name and storage_path goes on from there; "
    "another run's checkpoint may be passed in train_loop_config",
    "metadata": "pass it in train_loop_config",
}


class DataParallelTrainer:
    """Runs one function on many workers at once.

    `train_loop_per_worker` takes its config or nothing. `provisioner` says who gives the machines:
    a name, a text like 'local?nodes=2', or an options object; the default is the environment's
    SPOTFIT_PROVISIONER, else this machine.
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
        resume_from_checkpoint: Any = None,
        metadata: dict[str, Any] | None = None,
        validation_config: ValidationConfig | None = None,
        provisioner: Any = None,
    ) -> None:
        refuse_deprecated(
            type(self).__name__,
            {"resume_from_checkpoint": resume_from_checkpoint, "metadata": metadata},
            instead=_INSTEAD,
            unset=None,
        )
        mistakes = Mistakes()
        scaling = mistakes.check(lambda: typed("scaling_config", scaling_config, ScalingConfig))
        run = mistakes.check(lambda: typed("run_config", run_config, RunConfig))
        feeding = mistakes.check(lambda: typed("dataset_config", dataset_config, DataConfig))
        backend = mistakes.check(lambda: typed("backend_config", backend_config, BackendConfig))
        if scaling is not None:
            mistakes.check(lambda: _check_datasets(datasets, scaling))
        if validation_config is not None:
            mistakes.check(lambda: typed("validation_config", validation_config, ValidationConfig))
        mistakes.raise_all()
        self.train_loop_per_worker = train_loop_per_worker
        self.train_loop_config = train_loop_config
        self.backend_config: BackendConfig = backend
        self.scaling_config: ScalingConfig = scaling
        self.run_config: RunConfig = run
        self.datasets = dict(datasets or {})
        self.dataset_config: DataConfig = feeding
        self.validation_config = validation_config
        self.provisioner = provisioner

    def fit(self) -> Result:
        """Train to the end. Raises `TrainingFailedError` when that cannot be had, and errors of
        configuration before any machine is asked for."""
        if self.scaling_config.num_workers == 0:
            return self._fit_here()
        request = self._request()
        with warmed(request):
            from spotfit.client import fit as fitting  # dear: machines begin meanwhile

            handle = fitting.begin(request, show=True)
        return fitting.see_through(handle)

    def submit(self) -> RunHandle:
        """Start training and return at once; the run needs this process no more."""
        if self.scaling_config.num_workers == 0:
            raise ConfigError(
                "num_workers=0 runs in this very process: there is nothing to submit.",
                do="Call fit(), or ask for at least one worker.",
            )
        request = self._request()
        with warmed(request):
            from spotfit.client import fit as fitting

            return fitting.submit(request)

    @classmethod
    def restore(cls, *_args: Any, **_kwargs: Any) -> Any:
        """Not offered: a trainer of the same name and storage path continues by itself."""
        raise DeprecationWarning(
            "restore() is gone: fit() with the same name and storage_path continues."
        )

    @classmethod
    def can_restore(cls, *_args: Any, **_kwargs: Any) -> bool:
        """Not offered; see `restore`."""
        raise DeprecationWarning("can_restore() is gone: fit() with the same name continues.")

    def _request(self) -> FitRequest:
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
            validation=self.validation_config,
        )

    def _fit_here(self) -> Result:
        from spotfit.client.here import fit_here

        return fit_here(self._request())


def _check_datasets(datasets: Any, scaling: ScalingConfig) -> None:
    if not datasets:
        return
    if not isinstance(datasets, dict):
        raise ConfigError(
            f"datasets must be a dictionary by name, not {kind_of(datasets)}.",
            do="Write datasets={'train': ...}.",
        )
    if scaling.num_workers != 0:
        raise no_datasets_on_workers()
