"""Every promise of `Provisioner`, for any backend anybody writes.

class TestMyCloud(ProvisionerSuite):
    @pytest.fixture
    def provisioner(self) -> Provisioner:
        return MyProvisioner(...)    # its cloud is empty, or at least knows none of our tokens

    @pytest.fixture
    def cloud(self) -> Cloud | None:
        return MySimulator(...)      # where the cloud behind it can be told to misbehave
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Protocol

import msgspec
import pytest

from spotfit.core.errors import ConfigError, ProvisionError, ProvisionPermissionError, QuotaError
from spotfit.core.ids import Token
from spotfit.host import dice
from spotfit.host.clocks import SystemClock
from spotfit.model.group import GroupHandle, GroupPlan, GroupRequest, GroupStatus, NodeState
from spotfit.provision.api import Provisioner, Refusal
from spotfit.provision.launch import Launch

SECRET = "dGhlIHNlY3JldCBvZiB0aGlzIHJ1bjogMzIgYnl0ZXM="  # noqa: S105  # looked for everywhere
_LOOK_EVERY_S = 0.05


class Cloud(Protocol):
    """A cloud that can be told to misbehave."""

    def trouble(self, kind: str, times: int) -> None:
        """The next requests meet it: 'quota', 'permission', 'capacity', 'credentials',
        'unavailable'."""
        ...

    def reclaim(self) -> None:
        """Take the machine that came last away, without a word."""
        ...


class ProvisionerSuite:
    """Inherit it, and give a fixture `provisioner`."""

    patience_s: ClassVar[float] = 60.0
    """How long machines may take to come or go."""

    # ── what every test needs ────────────────────────────────────────────────────────────────────

    @pytest.fixture
    def remembers(self) -> bool:
        """Whether the cloud still knows the token of a group that was let go.

        Where it does not, a machine that is rented once more finds in the journal that nobody
        wants it, and leaves.
        """
        return True

    @pytest.fixture
    def cloud(self) -> Cloud | None:
        """None where the cloud cannot be told to misbehave."""
        return None

    @pytest.fixture
    def launch(self, tmp_path: Path) -> Launch:
        """Agents of a run that never begins: they look for its journal and wait."""
        return Launch(str(tmp_path / "run"), dice.new_run_id(), SECRET)

    @pytest.fixture
    def request_for(self) -> Callable[[int], GroupRequest]:
        """So many workers, under a token of their own."""

        def make(workers: int) -> GroupRequest:
            token = Token(f"t-{uuid.uuid4().hex[:12]}")
            return GroupRequest(token, workers, workers, run_name="suite")

        return make

    # ── plan ─────────────────────────────────────────────────────────────────────────────────────

    @pytest.mark.parametrize("workers", [1, 2, 3, 8])
    def test_a_plan_has_room_for_everybody_and_can_be_written_down(
        self,
        provisioner: Provisioner,
        request_for: Callable[[int], GroupRequest],
        workers: int,
    ) -> None:
        request = request_for(workers)
        plan = provisioner.plan(request)
        assert plan == provisioner.plan(request), "same request, same plan"
        assert plan.token == request.token
        assert plan.nodes * plan.slots >= workers
        assert plan.nodes >= 1
        assert _written(plan, GroupPlan) == plan

    def test_a_replacement_has_machines_of_the_same_size(
        self, provisioner: Provisioner, request_for: Callable[[int], GroupRequest]
    ) -> None:
        whole = provisioner.plan(request_for(8))
        part = provisioner.plan(msgspec.structs.replace(request_for(8), workers=1))
        assert part.slots == whole.slots
        assert part.nodes == 1

    def test_more_machines_than_there_can_be_are_refused_by_the_plan(
        self, provisioner: Provisioner, request_for: Callable[[int], GroupRequest]
    ) -> None:
        too_many = (provisioner.traits.max_nodes + 1) * provisioner.plan(request_for(1)).slots
        request = msgspec.structs.replace(request_for(1), workers=too_many)
        with pytest.raises(ConfigError):
            provisioner.plan(request)

    # ── submit, observe, cancel ──────────────────────────────────────────────────────────────────

    def test_machines_come_and_are_let_go(
        self,
        provisioner: Provisioner,
        launch: Launch,
        request_for: Callable[[int], GroupRequest],
    ) -> None:
        plan = provisioner.plan(request_for(2))
        handle = _granted(provisioner.submit(plan, launch))
        assert len(provisioner.observe(handle).nodes) == plan.nodes
        self._until(provisioner, handle, _all_run)
        provisioner.cancel(handle)
        self._until(provisioner, handle, lambda status: status.over)
        provisioner.cancel(handle)

    def test_asking_twice_is_asking_once(
        self,
        provisioner: Provisioner,
        launch: Launch,
        request_for: Callable[[int], GroupRequest],
    ) -> None:
        plan = provisioner.plan(request_for(1))
        first = _granted(provisioner.submit(plan, launch))
        assert _granted(provisioner.submit(plan, launch)) == first
        self._until(provisioner, first, _all_run)
        assert _granted(provisioner.submit(plan, launch)) == first
        assert len(provisioner.observe(first).nodes) == plan.nodes
        self._let_go(provisioner, first)

    def test_what_was_let_go_does_not_come_back_by_asking_again(
        self,
        provisioner: Provisioner,
        launch: Launch,
        request_for: Callable[[int], GroupRequest],
        remembers: bool,  # noqa: FBT001  # a fixture
    ) -> None:
        if not remembers:
            pytest.skip("this cloud forgets what was let go")
        plan = provisioner.plan(request_for(1))
        handle = _granted(provisioner.submit(plan, launch))
        self._let_go(provisioner, handle)
        again = provisioner.submit(plan, launch)
        if not isinstance(again, Refusal):
            assert provisioner.observe(again).over

    def test_a_handle_that_was_written_down_finds_its_group(
        self,
        provisioner: Provisioner,
        launch: Launch,
        request_for: Callable[[int], GroupRequest],
    ) -> None:
        plan = provisioner.plan(request_for(1))
        handle = _granted(provisioner.submit(plan, launch))
        read = _written(handle, GroupHandle)
        assert read == handle
        self._until(provisioner, read, _all_run)
        self._let_go(provisioner, read)

    def test_a_group_nobody_remembers_is_gone(
        self,
        provisioner: Provisioner,
        launch: Launch,
        request_for: Callable[[int], GroupRequest],
    ) -> None:
        plan = provisioner.plan(request_for(1))
        handle = _granted(provisioner.submit(plan, launch))
        self._let_go(provisioner, handle)
        unheard_of = self._renamed(handle)
        assert provisioner.observe(unheard_of).over
        provisioner.cancel(unheard_of)

    def test_the_run_s_secret_is_in_nothing_that_is_written_down(
        self,
        provisioner: Provisioner,
        launch: Launch,
        request_for: Callable[[int], GroupRequest],
    ) -> None:
        plan = provisioner.plan(request_for(1))
        handle = _granted(provisioner.submit(plan, launch))
        status = provisioner.observe(handle)
        for told in (plan, handle, status):
            assert SECRET.encode() not in msgspec.json.encode(told)
        self._let_go(provisioner, handle)

    # ── a cloud that misbehaves ──────────────────────────────────────────────────────────────────

    @pytest.mark.parametrize(
        ("kind", "error"),
        [
            ("quota", QuotaError),
            ("permission", ProvisionPermissionError),
            ("credentials", ProvisionPermissionError),
        ],
    )
    def test_what_waiting_does_not_cure_is_an_error_that_says_what_to_do(
        self,
        provisioner: Provisioner,
        launch: Launch,
        request_for: Callable[[int], GroupRequest],
        cloud: Cloud | None,
        kind: str,
        error: type[ProvisionError],
    ) -> None:
        plan = provisioner.plan(request_for(1))
        _told(cloud).trouble(kind, 100)
        with pytest.raises(error) as told:
            provisioner.submit(plan, launch)
        assert SECRET not in str(told.value)
        _told(cloud).trouble(kind, 0)

    def test_no_capacity_is_no_error_and_later_there_is_some(
        self,
        provisioner: Provisioner,
        launch: Launch,
        request_for: Callable[[int], GroupRequest],
        cloud: Cloud | None,
    ) -> None:
        plan = provisioner.plan(request_for(1))
        _told(cloud).trouble("capacity", 1_000_000)
        answer = provisioner.submit(plan, launch)
        if isinstance(answer, Refusal):
            assert not answer.final
            assert answer.why
        else:  # a cloud that queues: it says why nothing comes
            self._until(provisioner, answer, lambda status: bool(status.refusal))
        _told(cloud).trouble("capacity", 0)
        handle = _granted(provisioner.submit(plan, launch))
        self._until(provisioner, handle, _all_run)
        self._let_go(provisioner, handle)

    def test_a_service_that_is_out_of_order_for_a_moment_grants_nothing_and_refuses_nothing(
        self,
        provisioner: Provisioner,
        launch: Launch,
        request_for: Callable[[int], GroupRequest],
        cloud: Cloud | None,
    ) -> None:
        """Whatever is raised is no `ProvisionError`: it is asked again under the same token."""
        plan = provisioner.plan(request_for(1))
        _told(cloud).trouble("unavailable", 1_000_000)
        with pytest.raises(Exception) as told:  # noqa: PT011  # each client library has its own
            provisioner.submit(plan, launch)
        assert not isinstance(told.value, ProvisionError)
        _told(cloud).trouble("unavailable", 0)
        self._let_go(provisioner, _granted(provisioner.submit(plan, launch)))

    def test_a_machine_that_is_taken_away_is_told_with_its_reason(
        self,
        provisioner: Provisioner,
        launch: Launch,
        request_for: Callable[[int], GroupRequest],
        cloud: Cloud | None,
    ) -> None:
        market = _told(cloud)
        plan = provisioner.plan(request_for(1))
        handle = _granted(provisioner.submit(plan, launch))
        self._until(provisioner, handle, _all_run)
        market.reclaim()
        seen: list[NodeState] = []

        def left(status: GroupStatus) -> bool:
            seen.append(status.nodes[0].state)
            return status.nodes[0].state != NodeState.RUNNING

        status = self._until(provisioner, handle, left)
        if provisioner.traits.requeues_itself:
            self._until(provisioner, handle, _all_run)
        else:
            assert status.nodes[0].over
            assert status.nodes[0].reason
        self._let_go(provisioner, handle)

    # ── helpers ──────────────────────────────────────────────────────────────────────────────────

    def _until(
        self,
        provisioner: Provisioner,
        handle: GroupHandle,
        happens: Callable[[GroupStatus], bool],
    ) -> GroupStatus:
        """Look until it happens; the status that shows it."""
        clock = SystemClock()
        give_up_at = clock.now() + self.patience_s
        while not happens(status := provisioner.observe(handle)):
            assert clock.now() < give_up_at, f"it has not happened: {status}"
            clock.wait(_LOOK_EVERY_S)
        return status

    def _let_go(self, provisioner: Provisioner, handle: GroupHandle) -> None:
        provisioner.cancel(handle)
        self._until(provisioner, handle, lambda status: status.over)

    def _renamed(self, handle: GroupHandle) -> GroupHandle:
        """The handle of a group that never was; override it where names are more than text."""
        return msgspec.structs.replace(handle, token=Token("t-0123456789ab"), name="t-0123456789ab")


def _all_run(status: GroupStatus) -> bool:
    return all(node.state == NodeState.RUNNING for node in status.nodes)


def _granted(answer: GroupHandle | Refusal) -> GroupHandle:
    assert isinstance(answer, GroupHandle), f"refused: {answer.why}"
    return answer


def _told(cloud: Cloud | None) -> Cloud:
    if cloud is None:
        pytest.skip("this cloud cannot be told to misbehave")
    return cloud


def _written(told: Any, kind: type[Any]) -> Any:
    return msgspec.json.decode(msgspec.json.encode(told), type=kind)
