"""`fit()` and `submit()`: from a checked request to a run with requested machines.

Flow of `start_run`: preflight checks; read the journal; if the same run is active, rejoin it, else
upload the code bundle and append `FitStarted`; then take the first step of the headless leader,
which requests machines. `fit()` then waits for the end of the run, `submit()` returns.

`fit()` for a run that is already active: follow it if it is the same run, else refuse.

A run is the same if function, configuration, scaling and all uploaded code are unchanged.

Local mode (`num_workers=0`): the function runs in this process, without workers or retries.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import datetime
from functools import partial
from types import FrameType

import msgspec
from msgspec.structs import replace

from spotfit.checkpoint.snapshot_channel import run_save_at_end
from spotfit.client.bill_text import format_price_range
from spotfit.client.console import format_event
from spotfit.client.cost_limits import decision_interval_s
from spotfit.client.keyring import RunKeyring, open_authenticated
from spotfit.client.offer_query import OfferQuery
from spotfit.client.request import (
    FitRequest,
    PreflightResult,
    check_latest_checkpoint,
    largest_group,
    nest_train_contexts,
    run_preflight,
)
from spotfit.client.result import Result
from spotfit.client.run_handle import RunHandle, attach_headless_leader, create_driver_ledger
from spotfit.code.code_bundle import (
    DATASETS,
    TRAIN_FUNC_CONTEXT,
    CodeBundleRef,
    compute_code_fingerprint,
    upload_code_bundle,
)
from spotfit.code.function_pickle import takes_config
from spotfit.core.errors import (
    AlreadyExistsError,
    ConfigError,
    JournalError,
    RunActiveError,
    RunCancelledError,
    StoreError,
    TransientStoreError,
)
from spotfit.frameworks.backend_config import backend_hooks_class
from spotfit.host import log, system
from spotfit.ledger import keys
from spotfit.ledger.authenticated_store import AuthenticatedStore
from spotfit.ledger.journal import Ledger, check_no_gaps, read_run_id
from spotfit.model.events import FitStarted
from spotfit.model.failure_model import MarketPrior
from spotfit.model.spec import RunSpec, RunTiming
from spotfit.model.user_callback import TrainRunContext
from spotfit.model.view import JournalView, View
from spotfit.provision.api import Traits
from spotfit.security.run_key import RunKey
from spotfit.store.api import Store
from spotfit.store.factory import credentials_for_nodes
from spotfit.store.url import is_local_path
from spotfit.worker import training_api
from spotfit.worker.local_session import LocalSession, Peers

# --- fit() for a run that is already active -------------------------------------------------------


# Fields of `RunSpec` that do not identify a run, and the settings they come from. The active run
# keeps the values with which it was started.
_CHANGEABLE_SETTINGS = {
    "failure_limits": "failure_config",
    "relax_collectives": "failure_config",
    "retention": "checkpoint_config",
    "log_level": "logging_config",
    "has_callbacks": "callbacks",
    "time_budget_s": "time_budget_s",
    "validation": "validation_config",
    "feeders": "data_feeders",
    "provisioner": "provisioner",
    "provisioner_options": "provisioner",
}


def rejoin_run(
    request: FitRequest, view: View, preflight: PreflightResult, *, objects: Mapping[str, object]
) -> RunSpec:
    """Return the spec of the active run if the request describes the same run.

    `view` is that of the active run, and `objects` are those that would be uploaded with the
    function, by name. A warning names settings whose changes have no effect. Raises
    `RunActiveError` if the function, its configuration or any uploaded code has changed: otherwise
    the user would mistake the result of the old code for that of the new code.
    """
    spec = view.spec
    # Two steps: `fit_id` covers the function itself, the bundle fingerprint all modules and files.
    if spec.fit_id != request.fingerprint():
        raise _run_conflict(
            spec, preflight.store, "with a different function, train_loop_config or scaling"
        )
    current = compute_code_fingerprint(
        request.fn, request.config, runtime_env=preflight.runtime_env, objects=objects
    )
    if changed := msgspec.convert(spec.code_bundle, CodeBundleRef).list_changes(current):
        reason = f"with older code: {', '.join(changed)} changed after its start"
        raise _run_conflict(spec, preflight.store, reason)
    # Not an error: such a setting does not change what is trained, and the run need not restart.
    ignored = sorted(_changed_settings(request, spec) | _changed_limits(request, preflight, spec))
    log.warning(
        "run.rejoined",
        url=preflight.store.url,
        text="this run is already active; fit() follows it",
        **({"ignored": ", ".join(ignored)} if ignored else {}),
    )
    return spec


def _run_conflict(spec: RunSpec, store: Store, difference: str) -> RunActiveError:
    return RunActiveError(
        f"A run named {spec.name!r} is active in {store.url}, {difference}.",
        do=f"Follow that run with spotfit.attach({store.url!r}); or cancel it with `spotfit "
        f"cancel {store.url}` "
        "and call fit() again, which continues from its latest checkpoint; or choose another "
        "RunConfig(name=...).",
    )


def _changed_limits(request: FitRequest, preflight: PreflightResult, spec: RunSpec) -> set[str]:
    """Return the names of changed limits of the cost, which have no effect on the active run."""
    before, after = spec.cost, preflight.cost
    # A duration counts from each call of `fit()`: only a time can be compared.
    has_time = isinstance(request.run.deadline, datetime)
    is_kept = (before.deadline_ms is None) == (after.deadline_ms is None)
    is_same_deadline = before.deadline_ms == after.deadline_ms if has_time else is_kept
    changes = {
        "deadline": not is_same_deadline,
        "budget_usd": before.budget_usd != after.budget_usd,
        "fallback": before.uses_on_demand != after.uses_on_demand,
    }
    return {name for name, has_changed in changes.items() if has_changed}


def _changed_settings(request: FitRequest, spec: RunSpec) -> set[str]:
    """Return the names of changed settings that have no effect on the active run."""
    # With the identity of the active run: only what the request determines is compared.
    requested = request.build_spec(
        run_id=spec.run_id,
        name=spec.name,
        storage_url=spec.storage_url,
        code_bundle=spec.code_bundle,
    )
    if spec.feeders is not None:
        feeders = replace(spec.feeders, offers=(), networks=(), usd_per_hour=None)
        spec = replace(spec, feeders=feeders)
    # Compared as JSON data: the active spec was read from JSON, where tuples became lists.
    active_data, requested_data = (
        msgspec.json.decode(msgspec.json.encode(each)) for each in (spec, requested)
    )
    return {
        setting
        for field, setting in _CHANGEABLE_SETTINGS.items()
        if active_data[field] != requested_data[field]
    }


# 16 s in total: object stores usually recover from throttling within a few seconds.
_APPEND_RETRY_PAUSES_S = (0.1, 0.5, 1.0, 2.0, 4.0, 8.0)
_CANCEL_RETRY_PAUSE_S = 0.5
_INTERRUPT_TEXTS = (
    "cancelling the run after a save of its Checkpointer, if it has one; press Ctrl-C again to "
    "cancel without saving, and a third time to exit immediately",
    "cancelling the run without saving; press Ctrl-C again to exit immediately",
)


def wait_for_result(handle: RunHandle) -> Result:
    """Wait for the end of a started run, printing its output, and return its result.

    Ctrl-C requests the cancellation of the run, and KeyboardInterrupt is raised once it has been
    cancelled. A `Checkpointer` saves first, unless Ctrl-C is pressed again; the third Ctrl-C exits
    this process at once with code 130. Raises what `RunHandle.final_result` raises.
    """
    with _cancel_on_interrupt(handle) as interrupted:
        handle.watch()
    # Outside of the context: loading the result may block, and Ctrl-C must interrupt that.
    handle.log_summary()
    try:
        return handle.final_result()
    except RunCancelledError:
        # The user pressed Ctrl-C: raise what Python raises then, not its consequence.
        if interrupted.is_set():
            raise KeyboardInterrupt from None
        raise


def submit(request: FitRequest) -> RunHandle:
    """Start the run and return its handle without waiting for its end.

    While this process exists, a daemon thread supervises the run; the run does not depend on it.
    Raises what `start_run` raises.
    """
    handle = start_run(request)
    handle.supervise_in_background()
    return handle


def start_run(request: FitRequest, *, show_output: bool = False) -> RunHandle:
    """Start the run, or rejoin it if the same run is active, and request the first machines.

    Returns after the request, before the machines run. `show_output` makes the handle print worker
    output and log events. Raises `ConfigError`, `ShippingError`, `IntegrityError` or `StoreError`
    before any machine is requested, and `RunActiveError` if a different run with this name is
    active. An interruption (Ctrl-C) while machines are requested cancels a run that this call has
    started.
    """
    log.use_default_handler()
    preflight = run_preflight(request)
    request = dataclasses.replace(request, run=preflight.run, datasets=preflight.datasets)
    assert preflight.run.logging_config is not None
    log.set_level(preflight.run.logging_config.log_level)
    # Without entry 0, for example, an existing run would look like an unused directory.
    check_no_gaps(preflight.store)
    ledger = _open_ledger(preflight.store)
    # Before the journal is read: the handle listens to its entries.
    handle = RunHandle(ledger, filesystem_location=preflight.filesystem_location)
    view = ledger.catch_up()
    rejoins = view.is_active
    if handle.key is None:
        raise _missing_key_error(ledger)
    with _store_tables(request, preflight.store):
        if isinstance(view, View) and view.is_active:
            spec = rejoin_run(request, view, preflight, objects=_bundle_objects(request, ledger))
            handle.load_view(view)
        else:
            check_latest_checkpoint(view, ledger.store)
            if preflight.check_cost_of is not None:
                preflight.check_cost_of(view)
            _warn_if_finished(view)
            spec = _register_run(request, preflight, ledger, handle.key)
    attach_headless_leader(handle, ledger, spec)
    handle.show_output = show_output
    try:
        handle.supervise_once()
    except BaseException:  # including Ctrl-C: the caller gets no handle to cancel the run with
        if rejoins:  # another driver may be supervising this run
            raise
        handle.cancel("interrupted while machines were requested", save=False)
        handle.wait_for_release()
        raise
    return handle


def _open_ledger(store: Store) -> Ledger:
    """Return the ledger of the run in that directory, or of a new one with a new key."""
    # A continued run keeps its id, and with it the key of its payloads.
    if (run_id := read_run_id(store)) is not None:
        RunKeyring().record_url(run_id, store.url)
        return create_driver_ledger(open_authenticated(store), run_id)
    run_id = system.new_run_id()
    key = RunKeyring().create(run_id, url=store.url)
    return create_driver_ledger(AuthenticatedStore(store, key), run_id)


def _missing_key_error(ledger: Ledger) -> ConfigError:
    # Its groups of machines cannot be trusted, and its entries cannot be verified with a new key.
    return ConfigError(
        f"The run in {ledger.store.url} cannot be continued: this computer has no key of it.",
        do="Choose another RunConfig(name=...); or observe the run with spotfit.attach(); or call "
        "fit() on the computer where it was started; or set SPOTFIT_RUN_ID to "
        f"{ledger.run_id!r} and SPOTFIT_RUN_SECRET to the content of the file of that name in "
        "~/.spotfit/keys there.",
    )


def _register_run(
    request: FitRequest, preflight: PreflightResult, ledger: Ledger, key: RunKey
) -> RunSpec:
    offer_query = OfferQuery(preflight.provisioner, largest_group(request))
    has_accelerator = any(name in request.scaling.worker_resources for name in ("GPU", "TPU"))
    code_bundle = upload_code_bundle(
        request.fn,
        request.config,
        runtime_env=preflight.runtime_env,
        key=key,
        store=preflight.store,
        objects=_bundle_objects(request, ledger),
        has_accelerator=has_accelerator,
    )
    spec = request.build_spec(
        run_id=ledger.run_id,
        name=preflight.name,
        storage_url=preflight.store.url,
        code_bundle=msgspec.to_builtins(code_bundle),
    )
    spec = replace(spec, default_metadata=_store_default_metadata(request, preflight.store))
    # In the spec, because workers use the prior to choose their checkpoint interval, and they
    # cannot open a provisioner.
    traits = preflight.provisioner.traits
    market_prior = MarketPrior(mean_lifetime_s=traits.mean_lifetime_s, notice_s=traits.notice_s)
    timing = _choose_timings(preflight.store, traits)
    cost = preflight.cost
    if not cost.offers:
        cost = replace(cost, offers=offer_query.wait())
    of_feeders = preflight.feeders.offers if preflight.feeders is not None else ()
    if text := format_price_range(of_feeders):
        log.info("offers.listed", text=f"price of a machine for feeders: {text}")
    spec = replace(
        spec, timing=timing, market_prior=market_prior, cost=cost, feeders=preflight.feeders
    )
    # Last: from this entry on, any agent that starts finds the code bundle in the store.
    _append_fit_started(ledger, spec)
    url = preflight.store.url
    log.info(
        "run.started",
        text=f"{format_event(FitStarted(spec=spec))}; follow it with `spotfit follow {url}`",
    )
    return spec


def _store_tables(request: FitRequest, store: Store) -> AbstractContextManager[None]:
    """Let tables of datasets be uploaded as objects of their own, not in the code bundle.

    Also before a run is rejoined, for which the bundle is pickled: its size is limited.
    """
    if not request.datasets:
        return nullcontext()
    from spotfit.data.sources.stored_table import tables_stored_in

    return tables_stored_in(store)


def _store_default_metadata(request: FitRequest, store: Store) -> str:
    """Store the metadata that every checkpoint has by default; return its key, '' without any."""
    if not request.datasets:
        return ""
    from spotfit.data.preprocessors.stored_preprocessor import default_metadata

    metadata = default_metadata(request.datasets)
    if not metadata:
        return ""
    body = msgspec.json.encode(metadata)
    key = keys.default_metadata(hashlib.sha256(body).hexdigest())
    with suppress(AlreadyExistsError):  # the key is the hash of the content
        store.create(key, body)
    return key


def _warn_if_finished(view: JournalView) -> None:
    """Warn that a finished run is continued: its function may find nothing left to train."""
    latest = view.latest_checkpoint
    if view.fit_end is None or view.fit_end.outcome != "finished" or latest is None:
        return
    assert isinstance(view, View)
    step = "" if latest.step is None else f" (step {latest.step})"
    log.warning(
        "run.continued",
        text=f"the run {view.spec.name!r} has finished before and continues from its checkpoint "
        f"{latest.name}{step}; choose another RunConfig(name=...) to train from the beginning",
    )


def _append_fit_started(ledger: Ledger, spec: RunSpec) -> None:
    """Append `FitStarted`. Retries store failures; raises if another process started the run."""
    # The view read from the journal holds lists where the spec may hold tuples.
    own_bundle = msgspec.json.decode(msgspec.json.encode(spec.code_bundle))
    for pause_s in _APPEND_RETRY_PAUSES_S:
        before = ledger.journal_view
        try:
            after = ledger.append(FitStarted(spec=spec), after=before)
        except JournalError:
            # Another process started a run with another key in the same directory.
            if read_run_id(ledger.store) == ledger.run_id:
                raise
            raise _started_twice_error(ledger) from None
        # An unchanged count means that nothing was appended and `after.spec` is that of an earlier
        # fit, possibly with the same code bundle.
        is_started = after.fit_count > before.fit_count
        if is_started and isinstance(after, View) and after.spec.code_bundle == own_bundle:
            return
        if after.is_active:
            raise _started_twice_error(ledger)
        system.SystemClock().wait(pause_s)
    raise TransientStoreError(
        f"The first journal entry of the run in {ledger.store.url} could not be written in "
        f"{len(_APPEND_RETRY_PAUSES_S)} attempts.",
        do="Check that the storage is reachable and accepts writes, then call fit() again.",
    )


def _started_twice_error(ledger: Ledger) -> RunActiveError:
    return RunActiveError(
        f"Another process started a run in {ledger.store.url} at the same time.",
        do=f"Follow that run with spotfit.attach({ledger.store.url!r}), or choose another "
        "RunConfig(name=...).",
    )


def _bundle_objects(request: FitRequest, ledger: Ledger) -> dict[str, object]:
    """Return the objects that are uploaded with the training function, by name.

    Each process of the run unpickles only the objects it needs.
    """
    objects: dict[str, object] = {}
    train_context = nest_train_contexts(
        request.backend_config.train_func_context, request.run.callbacks or ()
    )
    if train_context is not nullcontext:
        objects[TRAIN_FUNC_CONTEXT] = train_context
    if request.datasets:
        from spotfit.data.rank_shards import TrainerDatasets

        objects[DATASETS] = TrainerDatasets(request.datasets, request.dataset_config)
    # Hooks, validation and callbacks are executed by sidecars; workers never unpickle them.
    if backend_hooks_class(request.backend_config) is not None:
        objects["backend_config"] = request.backend_config
    if request.validation is not None:
        objects["validation"] = (request.validation.fn, request.validation.task_config.fn_kwargs)
    if callbacks := [each for each in request.run.callbacks or () if each.has_event_methods()]:
        objects["callbacks"] = callbacks
        objects["run_context"] = _train_run_context(request, ledger)
    return objects


def _train_run_context(request: FitRequest, ledger: Ledger) -> TrainRunContext:
    run_config = request.run
    if credentials_for_nodes(ledger.store):
        # The file system object may hold credentials. Nodes receive them with their launch spec, so
        # they are not written to the bucket, not even encrypted.
        run_config = dataclasses.replace(run_config, storage_filesystem=None)
    return TrainRunContext(
        run_id=ledger.run_id,
        run_config=run_config,
        train_loop_config=request.config,
        scaling_config=request.scaling,
        backend_config=request.backend_config,
        dataset_config=request.dataset_config,
    )


def _choose_timings(store: Store, traits: Traits) -> RunTiming:
    """Return short intervals for local directories and backends, long ones for cloud services.

    Every poll of an object store is a billed request, and cloud APIs limit the request rate.
    """
    nearby = traits.is_nearby
    poll_s = 0.02 if is_local_path(store.url) else 0.2 if nearby else 1.0
    return RunTiming(
        observe_interval_s=traits.observe_interval_s,
        journal_poll_interval_s=poll_s,
        rejoin_timeout_s=2.0 if nearby else 5.0,
        heartbeat_timeout_s=6.0 if nearby else 10.0,
        validator_wait_timeout_s=30.0 if nearby else 300.0,
        decision_interval_s=decision_interval_s(traits),
    )


def _cancel_with_retries(handle: RunHandle, *, save: bool) -> None:
    """Request cancellation, retrying store failures indefinitely: machines cost money until then.

    It runs in a daemon thread, so it does not keep the process from exiting.
    """
    while True:
        try:
            return handle.cancel("Ctrl-C", save=save)
        except StoreError as error:
            log.warning("store.error", reason=error.message)
            system.SystemClock().wait(_CANCEL_RETRY_PAUSE_S)


@contextmanager
def _cancel_on_interrupt(handle: RunHandle) -> Iterator[threading.Event]:
    """Make Ctrl-C cancel the run after a save, a second one without; a third exits with code 130.

    In a notebook the third one raises KeyboardInterrupt instead. Yields an event that is set by the
    first one. Does nothing outside of the main thread, where Python cannot install signal handlers.
    """
    interrupted = threading.Event()
    count = 0

    def on_interrupt(_signal: int, _frame: FrameType | None) -> None:
        nonlocal count
        count += 1
        interrupted.set()
        if count >= 3 and "ipykernel" in sys.modules:
            raise KeyboardInterrupt  # an exit would end the kernel of the notebook
        # Without exit handlers and threads to join: one of them may be what hangs.
        if count >= 3:
            os._exit(130)  # 128 + SIGINT, the code by which shells report an interrupted process
        # In a thread: the handler interrupts the main thread, which may hold locks of the store.
        cancel = partial(_cancel_with_retries, handle, save=count == 1)
        threading.Thread(target=cancel, daemon=True).start()
        log.warning("run.interrupted", text=_INTERRUPT_TEXTS[count - 1])

    if threading.current_thread() is not threading.main_thread():
        yield interrupted
        return
    before = signal.signal(signal.SIGINT, on_interrupt)  # restored: the user may have one
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)


# --- Local mode (num_workers=0) -------------------------------------------------------------------


PeersContext = AbstractContextManager[Peers | None]
"""Context in which the processes of a launcher such as torchrun form a group.

Its value is None if there is no launcher."""


def fit_locally(
    request: FitRequest, open_peers: Callable[[], PeersContext] = nullcontext
) -> Result:
    """Call the training function in this process and return its result (`num_workers=0`).

    Its exceptions propagate unchanged; nothing is uploaded or retried. `open_peers` returns a
    context whose value is the group of a launcher such as torchrun, or None: with a group, every
    process calls the function and has its own result. A call within another training function
    ignores the launcher. Raises `ConfigError` for datasets that several processes cannot share.
    """
    log.use_default_handler()
    # Before the peers are opened: a function with an invalid signature must not form a group.
    wants_config = takes_config(request.fn)
    names = ("callbacks", "worker_runtime_env", "time_budget_s")
    ignored = [name for name in names if getattr(request.run, name)]
    if request.data_feeders is not None:
        ignored.append("data_feeders")
    for name in ignored:
        log.warning(
            "config.ignored",
            option=name,
            reason="num_workers=0 only calls the function in this process",
        )
    # The peers of a nested call need not make the same call, so joining their group may hang.
    with nullcontext() if training_api.has_session() else open_peers() as peers:
        session = _create_session(request, peers)
        value = None  # a context manager may suppress the exception of the function
        with training_api.use_session(session), request.backend_config.train_func_context():
            value = request.fn(request.config or {}) if wants_config else request.fn()
            _save_at_end(session)
    return Result(
        metrics=session.metrics,
        checkpoint=session.last_checkpoint,
        error=None,
        path=None,
        return_value=value,
    )


def _save_at_end(session: LocalSession) -> None:
    """Save the last steps of a Checkpointer; log why that is impossible."""
    end = run_save_at_end(session.snapshot_channel)
    if end is not None and end.error:
        log.warning("checkpoint.unsaved", step=end.step, reason=end.error)


def _create_session(request: FitRequest, peers: Peers | None) -> LocalSession:
    name = request.run.name or ""
    # Default names contain the time, so they differ between processes.
    if peers is not None:
        name = peers.broadcast(name)
    return LocalSession(
        name, peers, datasets=request.datasets, dataset_config=request.dataset_config
    )
