"""DataParallelTrainer: what to train, how wide, and where; `fit()` does the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spotfit.client import fit as fitting
from spotfit.client.handle import RunHandle
from spotfit.client.request import FitRequest
from spotfit.client.result import Result
from spotfit.core.errors import ConfigError
from spotfit.model.config import RunConfig, ScalingConfig


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
        validation_config: Any = None,
        provisioner: Any = None,
    ) -> None:
        _refuse_deprecated(resume_from_checkpoint=resume_from_checkpoint, metadata=metadata)
        _refuse_missing(datasets=datasets, validation_config=validation_config)
        self.train_loop_per_worker = train_loop_per_worker
        self.train_loop_config = train_loop_config
        self.backend_config = backend_config
        self.scaling_config = _typed("scaling_config", scaling_config, ScalingConfig)
        self.run_config = _typed("run_config", run_config, RunConfig)
        self.dataset_config = dataset_config
        self.provisioner = provisioner

    def fit(self) -> Result:
        """Train to the end. Raises `TrainingFailedError` when that cannot be had, and errors of
        configuration before any machine is asked for."""
        if self.scaling_config.num_workers == 0:
            return self._fit_here()
        return fitting.fit(self._request())

    def submit(self) -> RunHandle:
        """Start training and return at once; the run needs this process no more."""
        if self.scaling_config.num_workers == 0:
            raise ConfigError(
                "num_workers=0 runs in this very process: there is nothing to submit.",
                do="Call fit(), or ask for at least one worker.",
            )
        return fitting.submit(self._request())

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
        name, options = self._framework()
        return FitRequest(
            fn=self.train_loop_per_worker,
            config=self.train_loop_config,
            scaling=self.scaling_config,
            run=self.run_config,
            framework=name,
            framework_options=options,
            backend_config=self.backend_config,
            provisioner=self.provisioner,
        )

    def _framework(self) -> tuple[str, dict[str, Any]]:
        """Name and plain options of the framework the workers belong to."""
        if self.backend_config is None:
            return "none", {}
        options: tuple[str, dict[str, Any]] = self.backend_config.framework_options(
            self.scaling_config
        )
        return options

    def _fit_here(self) -> Result:
        from spotfit.client.here import fit_here

        return fit_here(self._request())


def _typed(name: str, given: Any, kind: type[Any]) -> Any:
    if given is None:
        return kind()
    if not isinstance(given, kind):
        raise ConfigError(
            f"{name} must be a spotfit.{kind.__name__}, not {type(given).__name__}.",
            do=f"Write {name}=spotfit.{kind.__name__}(...).",
        )
    return given


def _refuse_deprecated(**given: Any) -> None:
    for name, value in given.items():
        if value is not None:
            raise DeprecationWarning(
                f"`{name}` is gone: use the same name and storage_path, or the config."
            )


def _refuse_missing(**given: Any) -> None:
    for name, value in given.items():
        if value:
            raise ConfigError(
                f"`{name}` is not supported yet.", do="Read the data in the training function."
            )
