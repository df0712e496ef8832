"""fit(): nothing is rented before all is checked; and the same script run again is the same run."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from spotfit.client import fit as fitting
from spotfit.client.config import RunConfig
from spotfit.client.fit import begin, fit, submit
from spotfit.client.keyring import Keyring
from spotfit.core.errors import (
    ConfigError,
    IntegrityError,
    RunActiveError,
    RunCancelledError,
    ShippingError,
    TransientStoreError,
)
from spotfit.frameworks.config import Backend, BackendConfig
from spotfit.ledger import keys
from spotfit.model.cadence import Market
from spotfit.model.callbacks import UserCallback
from spotfit.model.events import CheckpointCommitted, FitEnded
from spotfit.ship.luggage import Luggage, Payload, fetch
from spotfit.store.local import LocalStore
from tests.unit.client.door import Door

FINISHED = FitEnded("finished", metrics={"loss": 0.5})


def another() -> int:
    """Another function."""
    return 8


def test_before_it_returns_machines_are_asked_for(door: Door) -> None:
    begin(door.request())
    assert len(door.cloud.submits) == 1
    spec = door.view.spec
    assert spec is not None
    assert (spec.name, spec.storage_url, spec.workers_max) == ("digits", door.url, 2)


def test_the_run_knows_what_its_backend_says_of_its_machines(door: Door) -> None:
    begin(door.request())
    assert door.view.spec is not None
    traits = door.cloud.traits
    assert door.view.spec.market == Market(traits.life_s, traits.notice_s)


def test_machines_get_the_key_and_nobody_else(door: Door) -> None:
    begin(door.request())
    key = Keyring().find(door.agent.run_id)
    assert key is not None
    (launch,) = door.cloud.launches
    assert (launch.secret, launch.run_id) == (key.to_text(), door.agent.run_id)
    bucket = b"".join(door.agent.store.get(one.key) for one in door.agent.store.list())
    assert key.to_text().encode() not in bucket


class Quiet(Backend):
    """Has hooks that do nothing."""


@dataclass
class Settings(BackendConfig):
    """A backend of the user's own, and a context."""

    backend_cls: type[Backend] = Backend
    train_func_context: Any = nullcontext


@pytest.mark.parametrize(
    ("config", "packed"),
    [
        (Settings(), set()),
        (Settings(Quiet), {"backend_config"}),
        (Settings(Backend, suppress), {"train_func_context"}),
    ],
)
def test_what_hooks_and_contexts_need_travels_along(
    door: Door, config: BackendConfig, packed: set[str]
) -> None:
    begin(door.request(backend_config=config))
    key, spec = Keyring().find(door.agent.run_id), door.view.spec
    assert key is not None
    assert spec is not None
    luggage = msgspec.convert(spec.luggage, Luggage)
    payload = Payload.open(fetch(luggage, store=door.agent.store), key=key)
    assert payload.objects.keys() == packed


def test_callbacks_learn_everything_the_trainer_was_given(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = door.request(config={"lr": 1}, backend_config=Settings())
    assert request.run.name is not None
    run = dataclasses.replace(request.run, callbacks=[Listener()])
    begin(dataclasses.replace(request, fn=takes_rate, run=run))
    key, spec = Keyring().find(door.agent.run_id), door.view.spec
    assert key is not None
    assert spec is not None
    luggage = msgspec.convert(spec.luggage, Luggage)
    payload = Payload.open(fetch(luggage, store=door.agent.store), key=key)
    context = payload.load("run_context")
    assert int(context.run_id, 16) >= 0
    assert context.get_run_config().name == context.run_config.name == "digits"
    assert context.train_loop_config == {"lr": 1}
    assert context.scaling_config == request.scaling
    assert type(context.backend_config).__name__ == "Settings"
    assert context.dataset_config is not None


class Listener(UserCallback):
    """Hears of reports."""

    def after_report(self, run_context: Any, metrics: Any, checkpoint: Any) -> None:
        return


def test_who_wants_to_hear_nothing_costs_no_process(door: Door) -> None:
    run = dataclasses.replace(door.request().run, callbacks=[UserCallback()])
    begin(dataclasses.replace(door.request(), run=run))
    assert door.view.spec is not None
    assert not door.view.spec.callbacks


def takes_rate(config: dict[str, int]) -> int:
    """Wants its config."""
    return config["lr"]


def test_it_returns_the_result(door: Door) -> None:
    door.clock.coming = iter([lambda: door.agents_end_it(FINISHED)])
    assert fit(door.request()).metrics == {"loss": 0.5}


@pytest.mark.parametrize("wrong", ["name", "function"])
def test_nothing_is_rented_for_what_cannot_be(door: Door, wrong: str, tmp_path: Path) -> None:
    lock = open(tmp_path / "x", "w")  # noqa: SIM115, PTH123  # an open file cannot be pickled
    given: dict[str, Any] = (
        {"run": RunConfig(name="../up", storage_path=str(tmp_path))}
        if wrong == "name"
        else {"fn": lambda: lock}
    )
    with pytest.raises((ConfigError, ShippingError)):
        fit(door.request(**given))
    lock.close()
    assert door.cloud.submits == []


def test_the_same_script_run_again_joins_the_run_that_goes_on(door: Door) -> None:
    one, two = begin(door.request()), begin(door.request())
    assert one.url == two.url
    assert door.view.fits == 1
    assert len(door.cloud.submits) == 1


def test_who_joins_from_another_machine_minds_nothing_with_a_wrong_key(
    door: Door, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(door.request())
    monkeypatch.setenv("SPOTFIT_HOME", str(tmp_path / "another machine"))
    begin(door.request())
    assert not (tmp_path / "another machine").exists()
    assert len({launch.secret for launch in door.cloud.launches}) == 1


def test_another_script_is_told_that_the_name_is_taken(door: Door) -> None:
    begin(door.request())
    with pytest.raises(RunActiveError, match="with another function or config") as refused:
        begin(door.request(another))
    assert "spotfit.attach(" in refused.value.do
    with pytest.raises(RunActiveError):
        begin(door.request(config={"lr": 1}))


def test_a_run_that_ended_is_continued_under_its_name(door: Door) -> None:
    begin(door.request())
    door.agents_end_it(FINISHED)
    before = door.view
    begin(door.request(another))
    view = door.view
    assert (view.fits, view.active, view.run_id) == (2, True, before.run_id)
    assert len(door.cloud.submits) == 2
    assert len({launch.secret for launch in door.cloud.launches}) == 1, "with its own key"


def test_a_run_whose_latest_checkpoint_is_gone_is_not_continued(door: Door) -> None:
    begin(door.request())
    door.write(CheckpointCommitted("c1", 1, 0, {}, (0,)))
    door.agents_end_it(FINISHED)
    with pytest.raises(IntegrityError):
        begin(door.request())
    assert len(door.cloud.submits) == 1


def test_submit_returns_at_once_and_minds_the_run_beside(door: Door) -> None:
    handle = submit(door.request())
    door.agents_end_it(FINISHED)
    assert handle.result(timeout_s=30).metrics == {"loss": 0.5}


# --- a bucket that fails -------------------------------------------------------------------------


def lose_creates(monkeypatch: pytest.MonkeyPatch, count: int) -> list[str]:
    """The next entries of the journal get no answer, and are not there; those that were lost."""
    create, lost = LocalStore.create, list[str]()

    def lossy(store: LocalStore, key: str, body: bytes) -> None:
        if key.startswith(keys.JOURNAL) and len(lost) < count:
            lost.append(key)
            raise TransientStoreError("no answer")
        create(store, key, body)

    monkeypatch.setattr(LocalStore, "create", lossy)
    return lost


def test_a_run_is_begun_although_the_bucket_stumbles(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = lose_creates(monkeypatch, 3)
    begin(door.request())
    assert lost == [keys.entry(0)] * 3
    assert door.view.fits == 1
    assert len(door.cloud.submits) == 1


def test_the_fit_before_is_not_taken_for_one_that_was_lost(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(door.request())
    door.agents_end_it(FINISHED)
    lost = lose_creates(monkeypatch, 1)
    begin(door.request())
    assert len(lost) == 1
    assert (door.view.fits, door.view.active) == (2, True)


def test_a_bucket_that_never_takes_the_first_entry_is_told(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose_creates(monkeypatch, 99)
    with pytest.raises(TransientStoreError, match="could not be begun in 6 tries"):
        begin(door.request())
    assert door.cloud.submits == []


# --- Ctrl-C --------------------------------------------------------------------------------------


def test_ctrl_c_lets_the_machines_go_before_it_interrupts(door: Door) -> None:
    def ctrl_c() -> None:
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    door.clock.coming = iter([ctrl_c])
    with pytest.raises(KeyboardInterrupt):
        fit(door.request())
    ended = door.view.ended
    assert ended is not None
    assert (ended.outcome, ended.why) == ("cancelled", "Ctrl-C")
    assert door.cloud.groups == {}
    assert signal.getsignal(signal.SIGINT) is before


def test_a_third_ctrl_c_leaves_at_once(door: Door) -> None:
    handle = begin(door.request())
    child = os.fork()
    if child == 0:
        handle.cancel = lambda why="": None  # type: ignore[method-assign]  # the bucket is slow
        with fitting._interrupts_cancel(handle):
            for _ in range(3):
                signal.raise_signal(signal.SIGINT)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 130


def test_in_another_thread_ctrl_c_stays_as_it_is(door: Door) -> None:
    before = signal.getsignal(signal.SIGINT)
    seen: list[Any] = []

    def in_a_thread() -> None:
        door.clock.coming = iter(
            [
                lambda: seen.append(signal.getsignal(signal.SIGINT)),
                lambda: door.agents_end_it(FitEnded("finished", metrics={"a": 1})),
            ]
        )
        seen.append(fit(door.request()).metrics)

    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join()
    assert seen == [before, {"a": 1}]


def test_what_a_signal_handler_raises_ends_the_waiting(door: Door) -> None:
    def give_up(_signal: int, _frame: object) -> None:
        raise TimeoutError("the scheduler wants its machine back")

    before = signal.signal(signal.SIGUSR1, give_up)
    door.clock.coming = iter([lambda: signal.raise_signal(signal.SIGUSR1)])
    try:
        with pytest.raises(TimeoutError, match="wants its machine back"):
            fit(door.request())
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert door.view.active, "the run goes on; attach() finds it"
    door.agents_end_it(FitEnded("finished"))


def test_ctrl_c_while_machines_are_asked_for_leaves_none_behind(door: Door) -> None:
    door.cloud.answers = [KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt):
        submit(door.request())
    ended = door.view.ended
    assert ended is not None
    assert (ended.outcome, ended.why) == (
        "cancelled",
        "it was interrupted while machines were asked for",
    )
    assert door.cloud.groups == {}


def test_who_was_cancelled_by_another_is_told_so(door: Door) -> None:
    door.clock.coming = iter([lambda: door.attached().cancel("not today")])
    with pytest.raises(RunCancelledError, match="not today"):
        fit(door.request())
