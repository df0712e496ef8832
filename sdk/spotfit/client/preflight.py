"""Checks of a request before any machine is requested. All errors are reported together.

The provisioner of a request, and prewarming of its backend while the driver prepares the run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

from spotfit.checkpoint.checkpoint_dir import StorageLocation
from spotfit.checkpoint.committed import check_present
from spotfit.client.request import FitRequest, load_callbacks_from_env
from spotfit.client.run_config import RunConfig, open_run_storage, resolve_filesystem_location
from spotfit.code.function_pickle import takes_config
from spotfit.code.runtime_env import RuntimeEnv
from spotfit.code.version_check import predict_mismatches
from spotfit.core.errors import (
    ConfigError,
    NotFoundError,
    SpotfitError,
    StorePermissionError,
    TransientStoreError,
)
from spotfit.core.ids import Token, parse_name
from spotfit.core.input_checks import ErrorCollector
from spotfit.frameworks.backend_config import backend_hooks_class
from spotfit.host import env, log, system
from spotfit.host.env import ignored_ray_variables
from spotfit.ledger.keys import RESERVED_PREFIX
from spotfit.model.group import GroupPlan, GroupRequest
from spotfit.model.view import JournalView
from spotfit.provision.api import Provisioner, prewarm
from spotfit.provision.profile import open_provisioner
from spotfit.store.api import Store
from spotfit.store.factory import probe_create, reopen_store

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
    # The maximum: an elastic run may grow to it, and its plan is the one most likely to be invalid.
    group = GroupRequest(
        token=PREFLIGHT_TOKEN,
        num_workers=request.scaling.max_workers,
        total_workers=request.scaling.max_workers,
        resources_per_worker=request.scaling.worker_resources,
    )
    return PlannedGroup(provisioner, provisioner.plan(group))


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
            prewarming.enter_context(prewarm(group.provisioner, group.plan, request.framework))
        # OSError: starting a process may fail for lack of memory or process ids.
        except (SpotfitError, OSError) as error:
            log.debug("fit.prewarm_skipped", reason=str(error))
        yield


_REACHABILITY_PROBES = f"{RESERVED_PREFIX}probes/reachability/"
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
    runtime_env = checks.check(lambda: RuntimeEnv.parse(request.run.worker_runtime_env))
    provisioner = checks.check(lambda: _check_provisioner(request))
    checks.check(env.check_all)
    callbacks = checks.check(load_callbacks_from_env)
    checks.check(lambda: backend_hooks_class(request.backend_config))
    if provisioner is not None:
        to_install = runtime_env.pip_distributions() if runtime_env is not None else ()
        # Packages of the runtime environment are installed on nodes before the function is loaded.
        for mismatch in predict_mismatches(provisioner.traits.software, to_install=to_install):
            checks.add(mismatch)
    # The checks below write to the store; they need a valid name and come last.
    checks.raise_all()
    store = storage.subtree(name)
    # The probe comes first: it retries temporary failures, the other check does not.
    _probe_store(store)
    _check_reachable(store)
    for option, reason in ignored_settings(request):
        log.warning("config.ignored", option=option, reason=reason)
    # Those of the environment come first: a site's defaults run before the script's callbacks.
    callbacks = [*callbacks, *(request.run.callbacks or [])]
    run = replace(request.run, callbacks=callbacks)
    return PreflightResult(run, store, resolve_filesystem_location(run), provisioner, runtime_env)


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
    key = f"{_REACHABILITY_PROBES}{system.new_token()}"
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
        check_present(store, view.latest_checkpoint.name)


def _check_provisioner(request: FitRequest) -> Provisioner:
    backend = plan_group(request)
    # Otherwise unavailable resources would be detected only when the first validation starts.
    if request.validation is not None and request.validation.own_machine is not False:
        backend.provisioner.plan(
            GroupRequest(
                token=PREFLIGHT_TOKEN,
                num_workers=1,
                total_workers=1,
                resources_per_worker=request.validation.resources,
                role="validate",
            )
        )
    return backend.provisioner
