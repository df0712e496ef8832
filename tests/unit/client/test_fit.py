"""fit() requests machines only after all checks, and rejoins a run that is active."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import threading
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import msgspec
import pytest
import torch

from spotfit.client import fit as fitting
from spotfit.client import run_handle
from spotfit.client.fit import start_run, submit, wait_for_result
from spotfit.client.keyring import RunKeyring
from spotfit.client.request import FitRequest
from spotfit.client.result import Result
from spotfit.client.run_config import RunConfig
from spotfit.client.run_handle import attach
from spotfit.code.code_bundle import CodeBundlePayload, CodeBundleRef, fetch_code_bundle
from spotfit.core.errors import (
    ConfigError,
    IntegrityError,
    RunActiveError,
    RunCancelledError,
    ShippingError,
    SpotfitError,
    TransientStoreError,
)
from spotfit.frameworks.backend_config import Backend, BackendConfig
from spotfit.ledger import keys
from spotfit.model.bill import Bill
from spotfit.model.config import ScalingConfig
from spotfit.model.events import CheckpointCommitted, FitEnded
from spotfit.model.failure_model import MarketPrior
from spotfit.model.group import GroupRequest
from spotfit.model.offer import Market, Offer
from spotfit.model.user_callback import UserCallback
from spotfit.model.view import JournalView
from spotfit.provision.offers import OfferListing
from spotfit.store.factory import open_store
from spotfit.store.local import LocalStore
from spotfit.testing.builders import a_committed_checkpoint
from tests.unit.client.bills import LOCAL, a_bill
from tests.unit.client.harness import ClientHarness

FINISHED = FitEnded(outcome="finished", metrics={"loss": 0.5})


def fit(request: FitRequest) -> Result:
    """What `trainer.fit()` calls, without prewarming."""
    return wait_for_result(start_run(request, show_output=True))


def another() -> int:
    """Another function."""
    return 8


def test_start_run_requests_machines_before_it_returns(harness: ClientHarness) -> None:
    start_run(harness.request())
    assert len(harness.cloud.submitted_tokens) == 1
    spec = harness.view.spec
    assert (spec.name, spec.storage_url, spec.max_workers) == ("digits", harness.url, 2)


def test_the_spec_contains_the_traits_of_the_provisioner(harness: ClientHarness) -> None:
    start_run(harness.request())
    traits = harness.cloud.traits
    assert harness.view.spec.market_prior == MarketPrior(
        mean_lifetime_s=traits.mean_lifetime_s, notice_s=traits.notice_s
    )


def test_only_machines_receive_the_key(harness: ClientHarness) -> None:
    start_run(harness.request())
    key = RunKeyring().find(harness.agent_ledger.run_id)
    assert key is not None
    (launch,) = harness.cloud.launches
    assert (launch.secret, launch.run_id) == (key.to_text(), harness.agent_ledger.run_id)
    bucket = b"".join(
        harness.agent_ledger.store.get(found.key) for found in harness.agent_ledger.store.list()
    )
    assert key.to_text().encode() not in bucket


class Quiet(Backend):
    """Hooks that do nothing."""


@dataclass
class Settings(BackendConfig):
    """A user-defined backend with a context."""

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
def test_objects_for_hooks_and_contexts_are_bundled(
    harness: ClientHarness, config: BackendConfig, packed: set[str]
) -> None:
    start_run(harness.request(backend_config=config))
    key, spec = RunKeyring().find(harness.agent_ledger.run_id), harness.view.spec
    assert key is not None
    code_bundle = msgspec.convert(spec.code_bundle, CodeBundleRef)
    payload = CodeBundlePayload.open(
        fetch_code_bundle(code_bundle, store=harness.agent_ledger.store), key=key
    )
    assert payload.object_pickles.keys() == packed


def test_callbacks_receive_all_arguments_of_the_trainer(
    harness: ClientHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = harness.request(config={"lr": 1}, backend_config=Settings())
    assert request.run.name is not None
    run = dataclasses.replace(request.run, callbacks=[Listener()])
    start_run(dataclasses.replace(request, fn=takes_rate, run=run))
    key, spec = RunKeyring().find(harness.agent_ledger.run_id), harness.view.spec
    assert key is not None
    code_bundle = msgspec.convert(spec.code_bundle, CodeBundleRef)
    payload = CodeBundlePayload.open(
        fetch_code_bundle(code_bundle, store=harness.agent_ledger.store), key=key
    )
    context = payload.load_object("run_context")
    assert int(context.run_id, 16) >= 0
    assert context.get_run_config().name == context.run_config.name == "digits"
    assert context.train_loop_config == {"lr": 1}
    assert context.scaling_config == request.scaling
    assert type(context.backend_config).__name__ == "Settings"
    assert context.dataset_config is not None


class Listener(UserCallback):
    """Receives reports."""

    def after_report(self, run_context: Any, metrics: Any, checkpoint: Any) -> None:
        return


def test_a_callback_without_event_methods_starts_no_process(harness: ClientHarness) -> None:
    run = dataclasses.replace(harness.request().run, callbacks=[UserCallback()])
    start_run(dataclasses.replace(harness.request(), run=run))
    assert not harness.view.spec.has_callbacks


def takes_rate(config: dict[str, int]) -> int:
    """Takes its config."""
    return config["lr"]


def test_fit_returns_the_result(harness: ClientHarness) -> None:
    harness.clock.next_events = iter([lambda: harness.end_run(FINISHED)])
    assert fit(harness.request()).metrics == {"loss": 0.5}


@pytest.mark.parametrize("wrong", ["name", "function"])
def test_an_invalid_request_requests_no_machines(
    harness: ClientHarness, wrong: str, tmp_path: Path
) -> None:
    lock = open(tmp_path / "x", "w")  # noqa: SIM115, PTH123  # an open file cannot be pickled
    fields: dict[str, Any] = (
        {"run": RunConfig(name="../up", storage_path=str(tmp_path))}
        if wrong == "name"
        else {"fn": lambda: lock}
    )
    with pytest.raises((ConfigError, ShippingError)):
        fit(harness.request(**fields))
    lock.close()
    assert harness.cloud.submitted_tokens == []


def test_the_same_script_rejoins_the_active_run(harness: ClientHarness) -> None:
    one, two = start_run(harness.request()), start_run(harness.request())
    assert one.url == two.url
    assert harness.view.fit_count == 1
    assert len(harness.cloud.submitted_tokens) == 1


def test_an_active_run_cannot_be_rejoined_without_its_key(
    harness: ClientHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_run(harness.request())
    monkeypatch.setenv("SPOTFIT_HOME", str(tmp_path / "another machine"))
    with pytest.raises(ConfigError, match="no key of it") as refused:
        start_run(harness.request())
    assert "spotfit.attach()" in refused.value.do
    assert not (tmp_path / "another machine").exists()
    assert len({launch.secret for launch in harness.cloud.launches}) == 1


def test_a_different_script_with_the_name_of_an_active_run_is_refused(
    harness: ClientHarness,
) -> None:
    start_run(harness.request())
    with pytest.raises(RunActiveError, match="with a different function") as refused:
        start_run(harness.request(another))
    assert "spotfit.attach(" in refused.value.do
    with pytest.raises(RunActiveError):
        start_run(harness.request(config={"lr": 1}))


def test_an_ended_run_is_continued_under_its_name(harness: ClientHarness) -> None:
    start_run(harness.request())
    harness.end_run(FINISHED)
    before = harness.view
    start_run(harness.request(another))
    view = harness.view
    assert (view.fit_count, view.is_active, view.run_id) == (2, True, before.run_id)
    assert len(harness.cloud.submitted_tokens) == 2
    assert len({launch.secret for launch in harness.cloud.launches}) == 1, "with its own key"


@pytest.mark.parametrize("outcome", ["finished", "cancelled"])
def test_continuing_a_finished_run_is_reported(
    harness: ClientHarness,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    outcome: Literal["finished", "cancelled"],
) -> None:
    monkeypatch.setattr(fitting, "check_latest_checkpoint", lambda *_: None)
    start_run(harness.request())
    harness.append_as_agent(a_committed_checkpoint("c1", step=100))
    harness.end_run(FitEnded(outcome=outcome))
    assert "run.continued" not in capsys.readouterr().err
    start_run(harness.request())
    err = capsys.readouterr().err
    warned = "has finished before and continues from its checkpoint c1 (step 100)" in err
    assert warned == (outcome == "finished")


def test_the_start_and_the_end_are_summarized(
    harness: ClientHarness, capsys: pytest.CaptureFixture[str]
) -> None:
    harness.clock.next_events = iter([lambda: harness.end_run(FINISHED)])
    fit(harness.request())
    first, *_, last = capsys.readouterr().err.splitlines()
    assert f"; follow it with `spotfit follow {harness.url}`" in first
    assert "run.started: run 'digits' started: 2 workers" in first
    assert "run.summary: run 'digits' finished" in last


@pytest.mark.parametrize("outcome", ["finished", "failed", "cancelled"])
def test_the_cost_is_summarized_after_the_release_of_the_machines(
    harness: ClientHarness,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    outcome: Literal["finished", "failed", "cancelled"],
) -> None:
    def bill_of(view: JournalView, _now_ms: int) -> Bill:
        return a_bill(is_final=all(group.is_closed for group in view.groups.values()))

    monkeypatch.setattr(run_handle, "bill_of", bill_of)
    harness.clock.next_events = iter([lambda: harness.end_run(FitEnded(outcome=outcome))])
    error = None if outcome == "finished" else SpotfitError
    with pytest.raises(error) if error else nullcontext():
        result = fit(harness.request())
        assert result.cost == a_bill()
    summary, cost = capsys.readouterr().err.splitlines()[-2:]
    assert f"run.summary: run 'digits' {outcome}" in summary
    assert "run.cost: $12.40 (at most $12.55); on demand $41.10, saved 70 %; 18.2 mach" in cost
    assert attach(harness.url).status().cost == a_bill()


def test_the_cost_of_machines_of_this_computer_is_not_summarized(
    harness: ClientHarness, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_handle, "bill_of", lambda *_: a_bill(LOCAL))
    harness.clock.next_events = iter([lambda: harness.end_run(FINISHED)])
    assert fit(harness.request()).cost == a_bill(LOCAL)
    assert "run.cost" not in capsys.readouterr().err


SPOT_OFFER = Offer(name="local/spot", provisioner="local", market=Market.SPOT)


def test_the_spec_contains_the_offers_of_the_backend(
    harness: ClientHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested: list[GroupRequest] = []

    def offers(request: GroupRequest) -> OfferListing:
        requested.append(request)
        return OfferListing(offers=(SPOT_OFFER,))

    monkeypatch.setattr(harness.cloud, "offers", offers, raising=False)
    start_run(harness.request())
    assert harness.view.spec.cost.offers == (SPOT_OFFER,)
    [request] = requested
    assert (request.num_workers, request.total_workers) == (2, 2)


def test_a_failed_listing_of_offers_is_no_error(
    harness: ClientHarness, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def offers(_request: GroupRequest) -> OfferListing:
        raise OSError("no route")

    monkeypatch.setattr(harness.cloud, "offers", offers, raising=False)
    start_run(harness.request())
    assert harness.view.spec.cost.offers == ()
    assert len(harness.cloud.submitted_tokens) == 1
    [line] = [one for one in capsys.readouterr().err.splitlines() if "offers.not_listed" in one]
    assert line.endswith('so that its prices are unknown reason="OSError: no route"')


def test_a_run_without_its_latest_checkpoint_is_not_continued(harness: ClientHarness) -> None:
    start_run(harness.request())
    harness.append_as_agent(
        CheckpointCommitted(name="c1", round=1, report_index=0, metrics={}, ranks=(0,))
    )
    harness.end_run(FINISHED)
    with pytest.raises(IntegrityError):
        start_run(harness.request())
    assert len(harness.cloud.submitted_tokens) == 1


def test_submit_returns_at_once_and_supervises_in_a_thread(harness: ClientHarness) -> None:
    handle = submit(harness.request())
    harness.end_run(FINISHED)
    assert handle.result(timeout_s=30).metrics == {"loss": 0.5}


# --- store failures ------------------------------------------------------------------------------


def lose_creates(monkeypatch: pytest.MonkeyPatch, count: int) -> list[str]:
    """Let the next `count` journal writes fail without effect; return the list of their keys."""
    create, lost = LocalStore.create, list[str]()

    def lossy(store: LocalStore, key: str, body: bytes) -> None:
        if key.startswith(keys.JOURNAL) and len(lost) < count:
            lost.append(key)
            raise TransientStoreError("no answer")
        create(store, key, body)

    monkeypatch.setattr(LocalStore, "create", lossy)
    return lost


def test_a_run_starts_despite_temporary_store_failures(
    harness: ClientHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = lose_creates(monkeypatch, 3)
    start_run(harness.request())
    assert lost == [keys.entry(0)] * 3
    assert harness.view.fit_count == 1
    assert len(harness.cloud.submitted_tokens) == 1


def test_an_earlier_fit_is_not_mistaken_for_a_failed_write(
    harness: ClientHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_run(harness.request())
    harness.end_run(FINISHED)
    lost = lose_creates(monkeypatch, 1)
    start_run(harness.request())
    assert len(lost) == 1
    assert (harness.view.fit_count, harness.view.is_active) == (2, True)


def test_a_store_that_never_accepts_the_first_entry_is_reported(
    harness: ClientHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose_creates(monkeypatch, 99)
    with pytest.raises(TransientStoreError, match="could not be written in 6 attempts"):
        start_run(harness.request())
    assert harness.cloud.submitted_tokens == []


# --- Ctrl-C --------------------------------------------------------------------------------------


def test_ctrl_c_releases_machines_before_it_interrupts(harness: ClientHarness) -> None:
    def ctrl_c() -> None:
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    harness.clock.next_events = iter([ctrl_c])
    with pytest.raises(KeyboardInterrupt):
        fit(harness.request())
    ended = harness.view.fit_end
    assert ended is not None
    assert (ended.outcome, ended.reason) == ("cancelled", "Ctrl-C")
    assert harness.cloud.groups == {}
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(("count", "saves"), [(1, True), (2, False)])
def test_only_the_first_ctrl_c_saves(harness: ClientHarness, count: int, saves: bool) -> None:
    handle = start_run(harness.request())
    with fitting._cancel_on_interrupt(handle):
        for _ in range(count):
            before = set(threading.enumerate())
            signal.raise_signal(signal.SIGINT)
            for thread in set(threading.enumerate()) - before:
                thread.join()
    assert (harness.view.cancel_reason, harness.view.saves_before_cancel) == ("Ctrl-C", saves)
    harness.end_run(FitEnded(outcome="cancelled"))


def test_the_third_ctrl_c_exits_at_once(harness: ClientHarness) -> None:
    handle = start_run(harness.request())
    child = os.fork()
    if child == 0:
        # The bucket is slow.
        handle.cancel = lambda reason="", *, save=True: None  # type: ignore[method-assign]
        with fitting._cancel_on_interrupt(handle):
            for _ in range(3):
                signal.raise_signal(signal.SIGINT)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 130


def test_the_third_ctrl_c_in_a_notebook_keeps_the_kernel(
    harness: ClientHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = start_run(harness.request())
    monkeypatch.setattr(handle, "cancel", lambda _reason="", *, save=True: None)
    monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
    monkeypatch.setattr(os, "_exit", lambda code: pytest.fail(f"exits with {code}"))
    with fitting._cancel_on_interrupt(handle):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_in_another_thread_no_signal_handler_is_installed(harness: ClientHarness) -> None:
    before = signal.getsignal(signal.SIGINT)
    seen: list[Any] = []

    def in_a_thread() -> None:
        harness.clock.next_events = iter(
            [
                lambda: seen.append(signal.getsignal(signal.SIGINT)),
                lambda: harness.end_run(FitEnded(outcome="finished", metrics={"a": 1})),
            ]
        )
        seen.append(fit(harness.request()).metrics)

    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join()
    assert seen == [before, {"a": 1}]


def test_an_exception_of_a_signal_handler_ends_the_wait(harness: ClientHarness) -> None:
    def raise_timeout(_signal: int, _frame: object) -> None:
        raise TimeoutError("the scheduler wants its machine back")

    before = signal.signal(signal.SIGUSR1, raise_timeout)
    harness.clock.next_events = iter([lambda: signal.raise_signal(signal.SIGUSR1)])
    try:
        with pytest.raises(TimeoutError, match="wants its machine back"):
            fit(harness.request())
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert harness.view.is_active, "the run continues without the driver"
    harness.end_run(FitEnded(outcome="finished"))


def test_ctrl_c_while_machines_are_requested_releases_them(harness: ClientHarness) -> None:
    harness.cloud.submit_results = [KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt):
        submit(harness.request())
    ended = harness.view.fit_end
    assert ended is not None
    assert (ended.outcome, ended.reason) == (
        "cancelled",
        "interrupted while machines were requested",
    )
    assert harness.cloud.groups == {}


def test_a_cancellation_from_elsewhere_raises(harness: ClientHarness) -> None:
    harness.clock.next_events = iter([lambda: harness.attach_run().cancel("not today")])
    with pytest.raises(RunCancelledError, match="not today"):
        fit(harness.request())


class DeviceTensor(torch.Tensor):
    """A tensor that says it is on a GPU."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda:0")


def test_a_tensor_on_a_gpu_is_refused_for_workers_without_one(harness: ClientHarness) -> None:
    weights = torch.zeros(1).as_subclass(DeviceTensor)

    def train() -> Any:
        return weights

    with pytest.raises(ShippingError, match=r"variable 'weights' is on the device cuda:0, and"):
        start_run(harness.request(train))
    assert list(open_store(harness.url).list()) == []
    with_gpu = ScalingConfig(num_workers=2, use_gpu=True)
    assert start_run(harness.request(train, scaling=with_gpu)).status().state == "waiting"
