"""Everything that can be known to fail before a machine is paid for: all mistakes, told at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from spotfit.checkpoint.handle import Address
from spotfit.checkpoint.restore import check_present
from spotfit.client.backend import planned
from spotfit.client.callbacks import named_callbacks
from spotfit.client.config import RunConfig, place_of, storage_of
from spotfit.client.request import FitRequest
from spotfit.core.errors import (
    ConfigError,
    NotFoundError,
    StorePermissionError,
    TransientStoreError,
)
from spotfit.core.ids import Token, parse_name
from spotfit.core.mistakes import Mistakes
from spotfit.frameworks.config import hooks_of
from spotfit.host import clocks, dice, env, log
from spotfit.host.theirs import without_effect
from spotfit.model.group import GroupRequest
from spotfit.model.view import View
from spotfit.provision.api import Provisioner
from spotfit.ship.environment import RuntimeEnv
from spotfit.ship.function import takes_config
from spotfit.ship.pins import foresee
from spotfit.store.api import Store
from spotfit.store.opening import reopened
from spotfit.store.probe import probe_create

_PAUSES_S = (0.2, 0.5, 1.0, 2.0)


@dataclass(frozen=True)
class Cleared:
    """A request that may take off."""

    run: RunConfig
    """As it was given, with the callbacks that the environment adds."""
    store: Store
    """Rooted at the run: `<storage_path>/<name>`."""
    within: Address | None
    """The same, where the user gave a file system."""
    provisioner: Provisioner
    runtime_env: RuntimeEnv

    @property
    def name(self) -> str:
        """The run's name."""
        assert self.run.name is not None
        return self.run.name


def clear(request: FitRequest) -> Cleared:
    """Check the function, the name, callbacks and hooks, the bucket, the backend and its machines.

    Raises the one error there is, or `ConfigErrors` with all of them.
    """
    checks = Mistakes()
    checks.check(lambda: takes_config(request.fn))
    name = checks.check(lambda: parse_name(request.run.name or "", what="The run's name"))
    storage = checks.check(lambda: storage_of(request.run))
    runtime_env = checks.check(lambda: RuntimeEnv.parse(request.run.worker_runtime_env))
    provisioner = checks.check(lambda: _provisioner(request))
    checks.check(env.check)
    callbacks = checks.check(named_callbacks)
    checks.check(lambda: hooks_of(request.backend_config))
    if provisioner is not None:
        bringing = runtime_env.brings() if runtime_env is not None else ()
        for mismatch in foresee(provisioner.traits.runs, bringing=bringing):
            checks.add(mismatch)
    checks.raise_all()
    store = storage.under(name)
    checks.check(lambda: _probe(store))
    checks.raise_all()
    checks.check(lambda: _reachable(store))
    checks.raise_all()
    for name, instead in no_effect(request):
        log.warning("no_effect", of=name, what_holds=instead)
    callbacks = [*callbacks, *(request.run.callbacks or [])]
    run = replace(request.run, callbacks=callbacks)
    return Cleared(run, store, place_of(run), provisioner, runtime_env)


def _probe(store: Store) -> None:
    """Race `create` on the bucket; a bucket that fails for a moment is asked again."""
    for pause_s in _PAUSES_S:
        try:
            return probe_create(store)
        except StorePermissionError:
            raise
        except TransientStoreError:
            clocks.SystemClock().wait(pause_s)
    return probe_create(store)


def _reachable(store: Store) -> None:
    """Machines find the run by its address alone: what was written must be seen through that."""
    if store.url.startswith("memory:"):
        raise ConfigError(
            f"storage_path={store.url!r} lives in this process only; machines could not reach it.",
            do="Give a directory or a bucket; memory:// is for num_workers=0 and for tests.",
        )
    key = f".spotfit/reach/{dice.new_token()}"  # a new name: what is found there is ours
    store.put(key, b"here")
    try:
        reopened(store).get(key)
    except (NotFoundError, ConfigError) as unseen:
        raise ConfigError(
            f"Machines could not reach the run: {store.url} does not lead to what was written.",
            do="Give storage_path as a URL or a directory that all machines share.",
        ) from unseen
    finally:
        store.delete(key)


def no_effect(request: FitRequest) -> Iterator[tuple[str, str]]:
    """What somebody asked for that changes nothing, and what holds instead."""
    yield from without_effect()
    if request.scaling.placement_strategy != "PACK":
        yield "placement_strategy", "workers fill one machine after the other"
    if request.scaling.label_selector:
        yield "label_selector", "the provisioner's options say which machines are rented"


def check_history(view: View, store: Store) -> None:
    """A continued run needs its latest checkpoint. Raises `IntegrityError` if that is gone."""
    if view.latest_checkpoint is not None:
        check_present(store, view.latest_checkpoint.name)


def _provisioner(request: FitRequest) -> Provisioner:
    backend = planned(request)
    if request.validation is not None and request.validation.own_machine is not False:
        needs = request.validation.resources
        backend.provisioner.plan(GroupRequest(Token("t-preflight"), 1, 1, needs, role="validate"))
    return backend.provisioner
