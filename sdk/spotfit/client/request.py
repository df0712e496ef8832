"""`FitRequest`: the arguments of a trainer, and their translation into the run's `RunSpec`.

Callbacks of a run: classes from SPOTFIT_CALLBACKS, and contexts around the training function.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from spotfit.client.run_config import RunConfig
from spotfit.code.fingerprint import fingerprint_function, stable_repr
from spotfit.core.errors import ConfigError
from spotfit.core.ids import RunId
from spotfit.core.input_checks import ErrorCollector
from spotfit.frameworks.backend_config import BackendConfig, backend_hooks_class
from spotfit.host import env
from spotfit.model.config import DataConfig, FailureConfig, ScalingConfig
from spotfit.model.spec import (
    FailureLimits,
    HangDetectionConfig,
    RetentionConfig,
    RunSpec,
    ValidationSpec,
)
from spotfit.model.user_callback import UserCallback
from spotfit.model.validation_config import ValidationConfig
from spotfit.provision.profile import non_default_options, provisioner_from_profile, resolve_options


@dataclass(frozen=True)
class FitRequest:
    """All arguments of one call of `fit()` or `submit()`, before the preflight checks."""

    fn: Callable[..., Any]
    config: dict[str, Any] | None
    scaling: ScalingConfig
    run: RunConfig
    framework: str
    framework_options: dict[str, Any]
    backend_config: BackendConfig
    provisioner: Any = None
    datasets: dict[str, Any] = field(default_factory=dict)
    dataset_config: DataConfig = field(default_factory=DataConfig)
    validation: ValidationConfig | None = None

    def resolve_provisioner(self) -> tuple[str, dict[str, Any]]:
        """Return provisioner name and options, such as ("aws_batch", {"queues": ("spot",)}).

        The options are the non-default ones, merged from the call, environment variables and
        `spotfit.toml`; reads these files. Raises `ConfigError` for invalid values or an unknown
        provisioner.
        """
        name, options = self.select_provisioner()
        return name, resolve_options(name, options)

    def select_provisioner(self) -> tuple[str, dict[str, Any]]:
        """Return name and explicit options of the trainer's `provisioner` or of its default.

        A string may contain options as a query: 'local?nodes=2'. Of an options object, only fields
        with non-default values are returned. The name is not looked up. Raises `ConfigError` for a
        value that is neither.
        """
        value = default_provisioner() if self.provisioner is None else self.provisioner
        if isinstance(value, str):
            return parse_provisioner(value)
        name = getattr(value, "provisioner", None)
        is_options_object = dataclasses.is_dataclass(value) and not isinstance(value, type)
        if isinstance(name, str) and is_options_object:
            return name, non_default_options(value)
        raise ConfigError(
            f"provisioner={value!r} is not a provisioner name or an options object.",
            do="Pass a name such as 'local', a string such as 'local?nodes=2', or the options "
            "object of a provisioner.",
        )

    def build_spec(
        self, *, run_id: RunId, name: str, storage_url: str, code_bundle: dict[str, Any]
    ) -> RunSpec:
        """Return the `RunSpec` of this request, which `fit()` writes to the journal.

        `name` is the run's name, `storage_url` the run's directory, and `code_bundle` a
        `CodeBundleRef` as plain data. Reads environment variables and `spotfit.toml` of this
        process. Raises `ConfigError` for invalid settings.
        """
        provisioner, options = self.resolve_provisioner()
        hooks = backend_hooks_class(self.backend_config)
        failure, checkpoint = self.run.failure_config, self.run.checkpoint_config
        assert failure is not None
        assert checkpoint is not None
        assert self.run.logging_config is not None
        return RunSpec(
            run_id=run_id,
            name=name,
            fit_id=self.fingerprint(),
            min_workers=self.scaling.min_workers,
            max_workers=self.scaling.max_workers,
            is_elastic=self.scaling.elasticity_enabled,
            resize_interval_s=self.scaling.elastic_resize_monitor_interval_s,
            resources_per_worker=self.scaling.worker_resources,
            failure_limits=_failure_limits(failure),
            retention=RetentionConfig(
                num_to_keep=checkpoint.num_to_keep,
                score_attribute=checkpoint.checkpoint_score_attribute,
                score_order="min" if checkpoint.checkpoint_score_order == "min" else "max",
            ),
            framework=self.framework,
            framework_options=self.framework_options,
            code_bundle=code_bundle,
            provisioner=provisioner,
            provisioner_options=options,
            storage_url=storage_url,
            relax_collectives=failure.relax_collectives_on_preemption,
            # Read on the driver and stored in the journal, so that all nodes use the same values.
            collective_timeout_s=env.read(env.COLLECTIVE_TIMEOUT_S) or None,  # 0: no timeout
            collective_warn_interval_s=env.read(env.COLLECTIVE_WARN_INTERVAL_S),
            log_level=self.run.logging_config.log_level,
            has_callbacks=any(each.has_event_methods() for each in self.run.callbacks or ()),
            has_backend_hooks=hooks is not None,
            share_devices=hooks is not None and hooks.share_cuda_visible_devices,
            hang_detection=_hang_detection_config(),
            validation=_validation_spec(self.validation) if self.validation is not None else None,
        )

    def fingerprint(self) -> str:
        """Return a hash of function code, configuration, scaling, framework and validation.

        It is equal if the unchanged script runs again, also in another process: `fit()` recognizes
        by it that an active run is the same. 32 hexadecimal digits; not for authentication.
        """
        # Provisioner, storage, failure limits and callbacks are left out: they do not change what
        # the function computes.
        parts = [
            fingerprint_function(self.fn),
            stable_repr(self.config),
            stable_repr(dataclasses.asdict(self.scaling)),
            self.framework,
            stable_repr(self.framework_options),
            stable_repr(
                # User-defined backend configs need not be dataclasses. The class is included: two
                # classes with equal attributes may set up different backends.
                [
                    f"{type(self.backend_config).__module__}.{type(self.backend_config).__qualname__}",
                    getattr(self.backend_config, "__dict__", {}),
                ]
            ),
            stable_repr(self.run.worker_runtime_env),
        ]
        if self.validation is not None:
            task = dataclasses.asdict(self.validation.task_config)
            parts += [fingerprint_function(self.validation.fn), stable_repr(task)]
        # 128 bits suffice to detect a change; nothing is authenticated with this hash.
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def default_provisioner() -> str:
    """Return the provisioner for trainers without one, such as "local" or "local?nodes=2".

    SPOTFIT_PROVISIONER, else `provisioner` in `spotfit.toml`, else "local". Raises `ConfigError` if
    the file cannot be read.
    """
    return env.read(env.PROVISIONER) or provisioner_from_profile() or "local"


def _failure_limits(config: FailureConfig) -> FailureLimits:
    return FailureLimits(
        worker=config.max_failures,
        platform=config.controller_failure_limit,
        preemption=config.max_preemption_failures,
        preemption_grace_s=config.preemption_grace_s,
    )


def _validation_spec(validation: ValidationConfig) -> ValidationSpec:
    return ValidationSpec(
        own_machine=validation.own_machine,
        resources=validation.resources,
        timeout_s=validation.task_config.timeout_s,
    )


def _hang_detection_config() -> HangDetectionConfig:
    return HangDetectionConfig(
        worker_timeout_s=env.read(env.HEALTH_TIMEOUT_S),
        # 0 disables it: a hang cannot be distinguished from a long step (decision 0022).
        no_progress_timeout_s=env.read(env.HANG_CONFIRM_S) if env.read(env.DETECT_HANGS) else 0.0,
        abort_on_hang=env.read(env.HANG_ACTION) == "fail",
        start_timeout_s=env.read(env.START_TIMEOUT_S),
    )


def parse_provisioner(text: str) -> tuple[str, dict[str, Any]]:
    """Return name and options of 'local?nodes=2' or 'sim://aws_batch?seed=1'.

    The results are ("local", {"nodes": 2}) and ("sim", {"seed": 1, "cloud": "aws_batch"}). Option
    values are parsed as JSON if possible, else kept as text. Raises `ConfigError` for an empty
    name.
    """
    address, _, query = text.partition("?")
    name, _, cloud = address.partition("://")
    pairs = parse_qsl(query, keep_blank_values=True)  # an option may be ''
    options: dict[str, Any] = {}
    for key, value in pairs:
        try:  # 'nodes=2' is a number, 'root=/data' a string
            options[key] = msgspec.json.decode(value)
        except msgspec.DecodeError:
            options[key] = value
    if cloud:
        options["cloud"] = cloud.rstrip("/")
    if not name:
        raise ConfigError(
            f"The provisioner {text!r} (provisioner=, --provisioner or SPOTFIT_PROVISIONER) has "
            "no name.",
            do="Write 'local' or 'local?nodes=2'.",
        )
    return name, options


# --- Callbacks of a run ---------------------------------------------------------------------------


ContextFactory = Callable[[], AbstractContextManager[Any]]
"""Returns a context manager in which the training function runs."""


@dataclass(frozen=True)
class NestedContexts:
    """Combines context factories into one, the first outermost. It is pickled to the workers."""

    factories: tuple[ContextFactory, ...]

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Enter all contexts in order; exit them in reverse order, also after an exception."""
        with ExitStack() as stack:
            # The stack exits what it has entered also if a later factory raises.
            for factory in self.factories:
                stack.enter_context(factory())
            yield


def nest_train_contexts(
    outermost: ContextFactory, callbacks: Sequence[UserCallback]
) -> ContextFactory:
    """Return one factory of the context in which each worker calls the training function.

    `outermost` is the backend's; inside are the contexts of `callbacks` that define one, in order.
    Returns `nullcontext` if there is none: `outermost` is then `nullcontext`, too.
    """
    factories = [outermost] if outermost is not nullcontext else []
    factories += [
        callback.train_func_context for callback in callbacks if callback.has_train_func_context()
    ]
    # A single factory is returned as it is, because unpickling needs no class of spotfit then.
    return NestedContexts(tuple(factories)) if len(factories) > 1 else (*factories, nullcontext)[0]


def load_callbacks_from_env() -> list[UserCallback]:
    """Return a new instance of every class in SPOTFIT_CALLBACKS; an empty list if it is unset.

    Classes are named as `package.module.Class`; their modules are imported. Raises `ConfigError`
    for a class that cannot be imported or instantiated, `ConfigErrors` for several.
    """
    errors = ErrorCollector()
    callbacks = [errors.check(partial(_create_callback, path)) for path in env.read(env.CALLBACKS)]
    errors.raise_all()
    return callbacks


def _create_callback(path: str) -> UserCallback:
    module, _, name = path.rpartition(".")
    try:
        callback_class = getattr(importlib.import_module(module), name)
        if isinstance(callback_class, type) and issubclass(callback_class, UserCallback):
            return callback_class()
        cause, reason = None, "it is not a subclass of spotfit.UserCallback"
    # Importing the module and calling the constructor execute user code, which may raise anything.
    except Exception as error:  # noqa: BLE001  # it becomes the cause of the ConfigError below
        cause, reason = error, f"{type(error).__name__}: {error}"
    raise ConfigError(
        f"The callback {path!r} in {env.CALLBACKS.name} cannot be created: {reason}.",
        do=f"Write importable classes into {env.CALLBACKS.name} as package.module.Class. They are "
        "instantiated without arguments.",
    ) from cause
