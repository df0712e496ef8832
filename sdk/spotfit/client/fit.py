"""fit(): check, pack, write the run down, ask for machines; then watch, or let go."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import Any

import msgspec
from msgspec.structs import replace

from spotfit.client.callbacks import surrounding
from spotfit.client.config import RunConfig
from spotfit.client.handle import RunHandle, adopted
from spotfit.client.join import join
from spotfit.client.keyring import Keyring
from spotfit.client.preflight import Cleared, check_history, clear
from spotfit.client.request import FitRequest
from spotfit.client.result import Result
from spotfit.core.errors import (
    RunActiveError,
    RunCancelledError,
    StoreError,
    TransientStoreError,
)
from spotfit.core.ids import AgentId
from spotfit.frameworks.config import hooks_of
from spotfit.host import clocks, dice, log
from spotfit.ledger.journal import check_whole
from spotfit.ledger.run import Ledger
from spotfit.model.cadence import Market
from spotfit.model.callbacks import TrainRunContext
from spotfit.model.events import FitStarted
from spotfit.model.spec import RunSpec, Tempo
from spotfit.provision.api import Traits
from spotfit.ship.luggage import AROUND, pack
from spotfit.ship.sign import RunKey
from spotfit.store.api import Store
from spotfit.store.opening import keys_for_machines

_PAUSES_S = (0.1, 0.5, 1.0, 2.0, 4.0, 8.0)
_CANCEL_AGAIN_S = 0.5


def fit(request: FitRequest) -> Result:
    """Run to the end and return its result. Raises `TrainingFailedError` and, before anything
    is rented, `ConfigError`, `ShippingError` or `StoreError`."""
    return see_through(begin(request, show=True))


def see_through(handle: RunHandle) -> Result:
    """What `fit` does once the run has begun; Ctrl-C ends the run."""
    with _interrupts_cancel(handle) as interrupted:
        handle.watch()
    try:
        return handle.outcome()
    except RunCancelledError:
        if interrupted.is_set():
            raise KeyboardInterrupt from None
        raise


def submit(request: FitRequest) -> RunHandle:
    """Start the run and return at once; a thread of this process minds it while it lives."""
    handle = begin(request)
    handle.mind_in_background()
    return handle


def begin(request: FitRequest, *, show: bool = False) -> RunHandle:
    """Everything up to the first machines asked for; or the handle of this run, if it goes on."""
    cleared = clear(request)
    request = dataclasses.replace(request, run=cleared.run)
    assert cleared.run.logging_config is not None
    log.at_least(cleared.run.logging_config.log_level)
    ledger = Ledger(
        cleared.store,
        dice.new_run_id(),
        AgentId(f"d{dice.new_agent_id()}"),
        wall_ms=clocks.wall_ms,
    )
    handle = RunHandle(ledger, None, within=cleared.within)
    check_whole(cleared.store)
    view = ledger.catch_up()
    ledger.run_id = view.run_id or ledger.run_id
    key = Keyring().find(ledger.run_id)
    joined = view.active
    if joined:
        spec = join(request, view, cleared, objects=_objects(request, ledger))
        handle.know(view)
    else:
        check_history(view, cleared.store)
        key = key or Keyring().make(ledger.run_id)
        spec = _write_down(request, cleared, ledger, key)
    adopted(handle, ledger, key, spec)
    handle.show = show
    try:
        handle.mind()
    except BaseException:  # Ctrl-C, too: nobody would hold the handle of what was asked for
        if joined:
            raise
        handle.cancel("it was interrupted while machines were asked for")
        handle.tidy()
        raise
    return handle


def _write_down(request: FitRequest, cleared: Cleared, ledger: Ledger, key: RunKey) -> RunSpec:
    luggage = pack(
        request.fn,
        request.config,
        runtime_env=cleared.runtime_env,
        key=key,
        store=cleared.store,
        objects=_objects(request, ledger),
    )
    spec = request.spec(
        run_id=ledger.run_id,
        name=cleared.name,
        storage_url=cleared.store.url,
        luggage=msgspec.to_builtins(luggage),
    )
    traits = cleared.provisioner.traits
    market = Market(traits.life_s, traits.notice_s)
    spec = replace(spec, tempo=_tempo(cleared.store, traits), market=market)
    _offer(ledger, spec)
    return spec


def _offer(ledger: Ledger, spec: RunSpec) -> None:
    """Take the name. A store that fails may be asked again; somebody else who took it may not."""
    for pause_s in _PAUSES_S:
        before = ledger.view
        after = ledger.append(FitStarted(spec), after=before)
        taken = after.fits > before.fits  # else it is still the fit before, perhaps of the same
        if taken and after.spec is not None and after.spec.luggage == _plain(spec.luggage):
            return
        if after.active:
            raise RunActiveError(
                f"Somebody else started a run in {ledger.store.url} at the same moment.",
                do="Follow theirs with spotfit.attach(url), or choose another RunConfig(name=...).",
            )
        clocks.SystemClock().wait(pause_s)
    raise TransientStoreError(
        f"The journal in {ledger.store.url} could not be begun in {len(_PAUSES_S)} tries.",
        do="See whether the bucket takes writes, then call fit() again.",
    )


def _plain(luggage: dict[str, Any]) -> Any:
    return msgspec.json.decode(msgspec.json.encode(luggage))


def _objects(request: FitRequest, ledger: Ledger) -> dict[str, object]:
    """What travels beside the function, for those who need it."""
    objects: dict[str, object] = {}
    around = surrounding(request.backend_config.train_func_context, request.run.callbacks or ())
    if around is not nullcontext:
        objects[AROUND] = around
    if hooks_of(request.backend_config) is not None:
        objects["backend_config"] = request.backend_config
    if request.validation is not None:
        objects["validation"] = (request.validation.fn, request.validation.task_config.fn_kwargs)
    if told := [one for one in request.run.callbacks or () if one.listens()]:
        objects["callbacks"] = told
        objects["run_context"] = _context(request, ledger)
    return objects


def _context(request: FitRequest, ledger: Ledger) -> TrainRunContext:
    return TrainRunContext(
        run_id=ledger.run_id,
        run_config=_without_secrets(request.run, ledger.store),
        train_loop_config=request.config,
        scaling_config=request.scaling,
        backend_config=request.backend_config,
        dataset_config=request.dataset_config,
    )


def _without_secrets(run: RunConfig, store: Store) -> RunConfig:
    """Keys that the machines get with their launch need not lie in the bucket, sealed or not."""
    return dataclasses.replace(run, storage_filesystem=None) if keys_for_machines(store) else run


def _tempo(store: Store, traits: Traits) -> Tempo:
    """Eager where looking is free, patient where every look is a request somebody pays."""
    nearby = traits.observe_s < 1.0
    on_disk = store.url.startswith(("/", "file://"))
    poll_s = 0.02 if on_disk else 0.2 if nearby else 1.0
    return Tempo(
        observe_s=traits.observe_s,
        poll_s=poll_s,
        rejoin_s=2.0 if nearby else 5.0,
        silent_s=6.0 if nearby else 10.0,
        validator_patience_s=30.0 if nearby else 300.0,
    )


def _cancel(handle: RunHandle) -> None:
    """However long the bucket is away."""
    while True:
        try:
            return handle.cancel("Ctrl-C")
        except StoreError as trouble:
            log.warning("store.trouble", why=trouble.what)
            clocks.SystemClock().wait(_CANCEL_AGAIN_S)


@contextmanager
def _interrupts_cancel(handle: RunHandle) -> Iterator[threading.Event]:
    """Ctrl-C asks the run to end and goes on waiting for that; a third one leaves at once."""
    interrupted = threading.Event()
    count = 0

    def on_interrupt(_signal: int, _frame: FrameType | None) -> None:
        nonlocal count
        count += 1
        interrupted.set()
        if count >= 3:
            os._exit(130)
        threading.Thread(target=_cancel, args=(handle,), daemon=True).start()
        log.warning(
            "run.interrupted", what="letting machines go; once or twice more leaves at once"
        )

    if threading.current_thread() is not threading.main_thread():
        yield interrupted
        return
    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)
