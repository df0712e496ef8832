"""`FitRequest`: the arguments of a trainer, and their translation into the run's `RunSpec`.

The request is checked before any machine is requested, and all errors are reported together.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

import msgspec

from spotfit.checkpoint.checkpoint_dir import StorageLocation
from spotfit.checkpoint.committed import check_present
from spotfit.client.cost_limits import read_limits
from spotfit.client.cost_plan import CostPlan, plan_cost
from spotfit.client.feeder_plan import feeder_request, plan_feeders
from spotfit.client.run_config import (
    DEFAULT_STORAGE_PATH,
    RunConfig,
    open_run_storage,
    resolve_filesystem_location,
)
from spotfit.client.trainer_datasets import check_configuration, datasets_identity, open_datasets
from spotfit.code.fingerprint import fingerprint_function, stable_repr
from spotfit.code.function_pickle import takes_config
from spotfit.code.runtime_env import RuntimeEnv
from spotfit.code.version_check import check_installed, predict_mismatches
from spotfit.core.errors import (
    ConfigError,
    NotFoundError,
    SpotfitError,
    StorePermissionError,
    TransientStoreError,
)
from spotfit.core.ids import RunId, Token, parse_name
from spotfit.core.input_checks import ErrorCollector
from spotfit.data.data_config import DataConfig
from spotfit.data.feeders import Feeders
from spotfit.frameworks.backend_config import BackendConfig, backend_hooks_class
from spotfit.host import env, log, system
from spotfit.host.env import ignored_ray_variables
from spotfit.ledger.journal import read_run_id
from spotfit.model.config import FailureConfig, ScalingConfig
from spotfit.model.group import GroupPlan, GroupRequest, Software
from spotfit.model.offer import Market
from spotfit.model.spec import (
    CostSpec,
    FailureLimits,
    FeederSpec,
    HangDetectionConfig,
    RetentionConfig,
    RunSpec,
    ValidationSpec,
)
from spotfit.model.user_callback import UserCallback
from spotfit.model.validation_config import ValidationConfig
from spotfit.model.view import JournalView
from spotfit.provision import feeder_backend
from spotfit.provision.api import Provisioner, open_client, prewarm
from spotfit.provision.combined import NAME as COMBINED_NAME
from spotfit.provision.feeder_backend import backends_of
from spotfit.provision.profile import (
    non_default_options,
    open_provisioner,
    provisioner_from_profile,
    resolve_options,
)
from spotfit.store.api import Store
from spotfit.store.factory import (
    new_probe_folder,
    probe_create,
    reopen_store,
    with_bucket_region,
)
from spotfit.store.storage_time import measure_offset_ms
from spotfit.store.url import is_local_path


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
    data_feeders: Feeders | None = None
    validation: ValidationConfig | None = None
    preload: tuple[str, ...] = ()
    """Modules that fork servers import in addition to those of the framework."""

    def resolve_provisioner(self) -> tuple[str, dict[str, Any]]:
        """Return provisioner name and options, such as ("aws_batch", {"queues": ("spot",)}).

        The options are the non-default ones, merged from the call, environment variables and
        `spotfit.toml`, which is read. With a backend of their own for feeders, both are options of
        one that routes between them. Raises `ConfigError` for invalid values or an unknown
        provisioner.
        """
        feeders = self.data_feeders
        if feeders is None or feeders.provisioner is None or not self.datasets:
            return self._resolve_workers()
        errors = ErrorCollector()
        of_feeders = dataclasses.replace(self, provisioner=feeders.provisioner, data_feeders=None)
        workers = errors.check(self._resolve_workers)
        others = errors.check(of_feeders.resolve_provisioner)
        errors.raise_all()
        assert workers is not None
        assert others is not None
        return feeder_backend.NAME, {"workers": [*workers], "feeders": [*others]}

    @property
    def feeder_spec(self) -> FeederSpec | None:
        """The feeders of the run; None without datasets, which they would transform."""
        return self.data_feeders.spec if self.data_feeders and self.datasets else None

    def _resolve_workers(self) -> tuple[str, dict[str, Any]]:
        if isinstance(self.provisioner, (list, tuple)):
            return self._combine_provisioners(self.provisioner)
        name, options = self.select_provisioner()
        return name, resolve_options(name, options)

    def _combine_provisioners(self, values: Sequence[Any]) -> tuple[str, dict[str, Any]]:
        errors = ErrorCollector()
        # Feeders have one backend for all of them.
        requests = [
            dataclasses.replace(self, provisioner=value, data_feeders=None) for value in values
        ]
        backends = [errors.check(request.resolve_provisioner) for request in requests]
        if not backends:
            text = "provisioner=[] has no backend."
            errors.add(ConfigError(text, do="Pass a name, or several in a list."))
        errors.raise_all()
        if len(backends) == 1:
            name, options = backends[0]
            return name, options
        # Plain lists: the options are stored as JSON, and compared with those of the next fit.
        return COMBINED_NAME, {"backends": [list(one) for one in backends]}

    def select_provisioner(self) -> tuple[str, dict[str, Any]]:
        """Return name and explicit options of the trainer's `provisioner` or of its default.

        A string may contain options as a query: 'local?nodes=2'. Of an options object, only fields
        with non-default values are returned. The name is not looked up. Not for a list of
        provisioners. Raises `ConfigError` for a value that is neither.
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
        assert not isinstance(self.run.time_budget_s, timedelta)  # converted to seconds
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
            preload=self.preload,
            code_bundle=code_bundle,
            provisioner=provisioner,
            provisioner_options=options,
            storage_url=storage_url,
            relax_collectives=failure.relax_collectives_on_preemption,
            # Read on the driver and stored in the journal, so that all nodes use the same values.
            collective_timeout_s=env.read(env.COLLECTIVE_TIMEOUT_S) or None,  # 0: no timeout
            collective_warn_interval_s=env.read(env.COLLECTIVE_WARN_INTERVAL_S),
            log_level=self.run.logging_config.log_level,
            time_budget_s=self.run.time_budget_s,
            has_callbacks=any(each.has_event_methods() for each in self.run.callbacks or ()),
            has_backend_hooks=hooks is not None,
            share_devices=hooks is not None and hooks.share_cuda_visible_devices,
            hang_detection=_hang_detection_config(),
            validation=_validation_spec(self.validation) if self.validation is not None else None,
            feeders=self.feeder_spec,
        )

    def fingerprint(self) -> str:
        """Return a hash of code, configuration, scaling, framework, environment and validation.

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
        if self.datasets:
            parts += [stable_repr(datasets_identity(self.datasets)), self.dataset_config.resume]
            parts += [stable_repr(self.dataset_config.datasets_to_split)]
            if self.dataset_config.num_workers is not None:
                parts.append(stable_repr(self.dataset_config.num_workers))
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


# --- The provisioner of a request -----------------------------------------------------------------


PREFLIGHT_TOKEN = Token("t-preflight")
"""Token of plans that are only checked and never submitted."""


class PlannedGroup(NamedTuple):
    """A provisioner, and its plan for all workers of the run."""

    provisioner: Provisioner
    plan: GroupPlan


def plan_group(request: FitRequest) -> PlannedGroup:
    """Open the request's provisioner and plan a group for the maximum number of workers.

    For checks and prewarming only: no machine is requested. Raises `ConfigError` for an unknown
    provisioner, invalid options or unavailable resources, and `MissingExtraError` if a package of
    the backend is not installed.
    """
    name, options = request.resolve_provisioner()
    provisioner = open_provisioner(name, options)
    return PlannedGroup(provisioner, provisioner.plan(largest_group(request)))


def largest_group(request: FitRequest) -> GroupRequest:
    """Return a request for the maximum number of workers, for questions before the start.

    An elastic run may grow to it, and its plan is the one most likely to be invalid.
    """
    return GroupRequest(
        token=PREFLIGHT_TOKEN,
        num_workers=request.scaling.max_workers,
        total_workers=request.scaling.max_workers,
        resources_per_worker=request.scaling.worker_resources,
    )


@contextmanager
def prewarm_backend(request: FitRequest) -> Iterator[None]:
    """Let the backend start free preparations, such as local processes, within the context.

    Machines that the run has not used by the end of the context are ended. Errors of the
    preparation are only logged; the preflight checks report them. See `provision.api.prewarm` and
    decision 0033.
    """
    with ExitStack() as prewarming:
        try:
            group = plan_group(request)
            prewarming.enter_context(
                prewarm(group.provisioner, group.plan, request.framework, request.preload)
            )
        # OSError: starting a process may fail for lack of memory or process ids.
        except (SpotfitError, OSError) as error:
            log.debug("fit.prewarm_skipped", reason=str(error))
        yield


_PROBE_RETRY_PAUSES_S = (0.2, 0.5, 1.0, 2.0)  # bridges throttling; longer outages are reported


@dataclass(frozen=True)
class PreflightResult:
    """What the checks of a valid request have opened and resolved."""

    run: RunConfig
    """The run configuration of the request, with the callbacks of SPOTFIT_CALLBACKS added."""
    store: Store
    """The directory of the run: `<storage_path>/<name>`."""
    filesystem_location: StorageLocation | None
    """The same directory in RunConfig(storage_filesystem=...); None without one."""
    provisioner: Provisioner
    runtime_env: RuntimeEnv
    cost: CostSpec = field(default_factory=CostSpec)
    """Offers and limits; without offers if the run has no limits."""
    check_cost_of: Callable[[JournalView], None] | None = None
    """Check the limits of a fit that continues the run of that view. Raises `ConfigError`, or
    `ConfigErrors`. None for a new run, whose limits were checked, and without limits."""
    datasets: dict[str, Any] = field(default_factory=dict)
    """The trainer's datasets by name, with their files listed."""
    feeders: FeederSpec | None = None
    """The feeders of the run, with their offers and price as far as they are needed."""

    @property
    def name(self) -> str:
        """Name of the run, as checked: valid as a directory name."""
        assert self.run.name is not None
        return self.run.name


def run_preflight(request: FitRequest) -> PreflightResult:
    """Check the function, name, callbacks, backend hooks, store, provisioner and environment.

    Called by `fit()` and `submit()` before anything is uploaded. Writes and deletes probe objects
    in the run's directory, and logs settings without effect as warnings. Raises the only error, or
    `ConfigErrors` with all of them; errors of the store are raised alone.
    """
    checks = ErrorCollector()
    checks.check(lambda: takes_config(request.fn))
    name = checks.check(lambda: parse_name(request.run.name or "", what="RunConfig(name=...):"))
    storage = checks.check(lambda: open_run_storage(request.run))
    run_folder = storage.subtree(name) if storage is not None and name is not None else None
    datasets = checks.check(lambda: _open_datasets(request, run_folder))
    runtime_env = checks.check(lambda: RuntimeEnv.parse(request.run.worker_runtime_env))
    provisioner = checks.check(lambda: _check_provisioner(request))
    checks.check(env.check_all)
    callbacks = checks.check(load_callbacks_from_env)
    checks.check(lambda: backend_hooks_class(request.backend_config))
    if provisioner is not None:
        checks.check(lambda: _check_software(request, provisioner, runtime_env))
    if storage is not None and provisioner is not None:
        backend = next(backends_of(provisioner))
        checks.check(lambda: _check_storage_is_shared(storage, request.run, backend))
    feeders = plan = None
    if provisioner is not None:
        feeders = checks.check(lambda: _plan_feeders(request, provisioner))
    if storage is not None and provisioner is not None:
        plan = checks.check(lambda: _plan_cost(request, provisioner, storage, feeders))
    # Limits of a run with earlier fits depend on its journal, which is read later.
    is_continued = False
    if storage is not None and name is not None and plan is not None:
        is_continued = read_run_id(storage.subtree(name)) is not None
    if plan is not None and not is_continued:
        checks.check(lambda: plan.check(plan.limits))
    # The checks below write to the store; they need a valid name and come last.
    checks.raise_all()
    # Before the probe, so that it tests the URL that machines open.
    store = with_bucket_region(storage).subtree(name)
    # The probe comes first: it retries temporary failures, the other check does not.
    _probe_store(store)
    _check_reachable(store)
    for option, reason in ignored_settings(request):
        log.warning("config.ignored", option=option, reason=reason)
    # Those of the environment come first: a site's defaults run before the script's callbacks.
    callbacks = [*callbacks, *(request.run.callbacks or [])]
    run = replace(request.run, callbacks=callbacks)
    location = resolve_filesystem_location(run)
    cost = CostSpec() if plan is None else plan.spec
    check = plan.check_continued if plan is not None and is_continued else None
    return PreflightResult(
        run, store, location, provisioner, runtime_env, cost, check, datasets, feeders
    )


def _check_software(
    request: FitRequest, provisioner: Provisioner, runtime_env: RuntimeEnv | None
) -> None:
    checks = ErrorCollector()
    to_install = runtime_env.pip_distributions() if runtime_env is not None else ()
    checked: list[Software] = []
    for backend in backends_of(provisioner):
        software = backend.traits.software
        if software in checked:
            continue
        checked.append(software)
        # Packages of the runtime environment are installed on nodes before the function is loaded.
        for mismatch in predict_mismatches(software, to_install=to_install):
            checks.add(mismatch)
        if runtime_env is not None and software.is_callers:
            required = request.backend_config.required_modules(runtime_env.env_vars)
            checks.check(partial(check_installed, required, to_install=to_install))
    checks.raise_all()


def _open_datasets(request: FitRequest, run_folder: Store | None) -> dict[str, Any]:
    if not request.datasets:
        return {}
    from spotfit.data.sources.engine_frames import frames_written_in

    with frames_written_in(run_folder) if run_folder is not None else nullcontext():
        opened = open_datasets(request.datasets)
    check_configuration(opened, request.dataset_config, num_workers=request.scaling.min_workers)
    return dict(opened)


def _probe_store(store: Store) -> None:
    """Check that `create` of the store is atomic. Retries temporary failures.

    Raises `AtomicCreateUnsupportedError`, `StorePermissionError` or `TransientStoreError`.
    """
    for pause_s in _PROBE_RETRY_PAUSES_S:
        try:
            return probe_create(store)
        except StorePermissionError:  # retrying does not help
            raise
        except TransientStoreError:
            system.SystemClock().wait(pause_s)
    return probe_create(store)  # the last attempt: its error is the one that is reported


def _plan_cost(
    request: FitRequest,
    provisioner: Provisioner,
    storage: Store,
    feeders: FeederSpec | None,
) -> CostPlan | None:
    """Return the limits of the cost with the offers that the run may rent; rents nothing.

    None if the backend may choose the machines.
    """
    # Without limits no other clock is needed.
    limits = read_limits(request.run, provisioner.traits, system.wall_ms())
    is_combined = next(backends_of(provisioner)).name == COMBINED_NAME
    if not limits.is_set and not is_combined:
        return None
    plan = plan_cost(
        request.run,
        provisioner,
        largest_group(request),
        system.wall_ms() + _clock_offset_ms(storage),
        feeders=feeders,
        rents_validation=may_rent_validation(request),
    )
    if not limits.is_set and not any(one.offer.market is Market.SPOT for one in plan.plans):
        return None  # without prices the backends are tried in their order
    return plan


def may_rent_validation(request: FitRequest) -> bool:
    """Return whether validations may have machines of their own."""
    return request.validation is not None and request.validation.own_machine is not False


def _plan_feeders(request: FitRequest, provisioner: Provisioner) -> FeederSpec | None:
    spec, has_budget = request.feeder_spec, request.run.budget_usd is not None
    if spec is None:
        return None
    return plan_feeders(spec, provisioner, largest_group(request), needs_price=has_budget)


def _clock_offset_ms(storage: Store) -> int:
    key = f"{new_probe_folder()}/0"
    try:
        return measure_offset_ms(storage, key, lambda: storage.put(key, b"probe"), system.wall_ms)
    finally:
        storage.delete(key)


def check_directory_is_shared(
    path: str, provisioner: Provisioner, *, setting: str, is_default: bool = False
) -> None:
    """Check that machines of the provisioner may see the local directory `path`.

    A machine without it could not report that: its agent finds no run. `setting` names the argument
    in the error, such as "RunConfig(storage_path=...)"; `is_default` is whether its default is
    used. Raises `ConfigError`.
    """
    shared = provisioner.traits.shared_directories
    if shared == "never":
        reason = "a directory of this computer, which its machines cannot read"
    elif shared == "possibly" and sys.platform == "win32":
        reason = "a path of Windows, which its machines with Linux do not have"
    elif shared == "possibly" and is_default:
        reason = "the default, a directory of this computer that its machines may not share"
    else:
        return
    raise ConfigError(
        f"{setting.replace('...', repr(path))} with provisioner {provisioner.name!r} is {reason}.",
        do=f"Set {setting} to a bucket such as 's3://bucket/runs'"
        + (
            ", or to a directory that all machines mount."
            if shared == "possibly" and sys.platform != "win32"
            else "."
        ),
    )


def _check_storage_is_shared(storage: Store, run: RunConfig, provisioner: Provisioner) -> None:
    if not is_local_path(storage.url):
        return
    path = str(run.storage_path)
    check_directory_is_shared(
        path,
        provisioner,
        setting="RunConfig(storage_path=...)",
        is_default=path == str(Path(DEFAULT_STORAGE_PATH).expanduser()),
    )


def _check_reachable(store: Store) -> None:
    """Check that nodes, which receive only the URL, will open the same store.

    Writes a probe object and reads it through a store opened from the URL. Raises `ConfigError`.
    """
    if store.url.startswith("memory:"):
        raise ConfigError(
            f"RunConfig(storage_path={store.url!r}) exists only in the process that called fit(); "
            "machines cannot read it.",
            do="Use a directory or a bucket; memory:// is for num_workers=0 and for tests.",
        )
    key = f"{new_probe_folder()}/0"
    store.put(key, b"probe")
    try:
        reopen_store(store).get(key)
    except (NotFoundError, ConfigError) as error:
        raise ConfigError(
            f"An object that was written to storage_path cannot be read from {store.url}, which "
            "nodes will open.",
            do="Set RunConfig(storage_path=...) to a URL, or to a directory that all nodes share.",
        ) from error
    finally:  # also after a failure: no probe object must remain in the run's directory
        store.delete(key)


def ignored_settings(request: FitRequest) -> Iterator[tuple[str, str]]:
    """Yield (setting, reason) for each setting of the request or environment that has no effect.

    For example ("label_selector", "the options of the provisioner select the machines").
    """
    yield from ignored_ray_variables()
    if request.scaling.placement_strategy != "PACK":
        yield "placement_strategy", "spotfit always fills one machine after the other"
    if request.scaling.label_selector:
        yield "label_selector", "the options of the provisioner select the machines"


def check_latest_checkpoint(view: JournalView, store: Store) -> None:
    """Check that the latest checkpoint in the journal of a continued run exists in `store`.

    `store` is rooted at the run's directory. Does nothing if the run has no checkpoint. Raises
    `IntegrityError` if files are missing or have another size; their content is not read.
    """
    if view.latest_checkpoint is not None:
        latest = view.latest_checkpoint
        check_present(store, latest.name, digest=latest.manifests_digest)


def _open_client(provisioner: Provisioner) -> None:
    """Detect a missing client library, region or the like before anything is uploaded."""
    try:
        open_client(provisioner)
    except SpotfitError:
        raise
    # Anything else, such as a metadata server that does not answer, may be temporary: the request
    # for machines is repeated.
    except Exception as error:  # noqa: BLE001  # each client library has its own errors
        log.warning("provisioner.not_opened", reason=f"{type(error).__name__}: {error}")


def _check_provisioner(request: FitRequest) -> Provisioner:
    backend = plan_group(request)
    _open_client(backend.provisioner)
    # Otherwise unavailable resources would be detected only when the machines are requested.
    if request.validation is not None and may_rent_validation(request):
        backend.provisioner.plan(
            GroupRequest(
                token=PREFLIGHT_TOKEN,
                num_workers=1,
                total_workers=1,
                resources_per_worker=request.validation.resources,
                role="validate",
            )
        )
    if request.data_feeders is not None and request.data_feeders.spec.max_nodes:
        backend.provisioner.plan(feeder_request(request.data_feeders.spec, largest_group(request)))
    return backend.provisioner
