"""Buckets and machines of live tests, with real agents and workers, which must leave nothing."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import spotfit
from spotfit.client.run_handle import RunHandle
from spotfit.core.errors import JournalError
from spotfit.host import env
from spotfit.ledger.journal import Journal
from spotfit.model.events import JournalEntry, JournalEvent, RoundClosed, RoundOpened
from spotfit.model.view import JournalView
from spotfit.policy import capacity
from spotfit.store.factory import open_store
from spotfit_localsim.live.preemption import Reclaimer
from spotfit_provisioners.local import machine_pool
from spotfit_provisioners.local.options import LocalOptions
from spotfit_provisioners.local.processes import current_process
from spotfit_provisioners.local.state_dir import LocalCloudDir, LocalNode

TIMEOUT_S = 60.0
"""Timeout of waits, for a loaded machine."""
_POLL_INTERVAL_S = 0.02
# Machines that hang are released after `SELF_EXIT_TIMEOUT_S`.
_RELEASE_TIMEOUT_S = 2 * capacity.SELF_EXIT_TIMEOUT_S

ResultT = TypeVar("ResultT")


def eventually(condition: Callable[[], ResultT], *, within_s: float = TIMEOUT_S) -> ResultT:
    """Return the result of `condition` once it is true."""
    deadline = time.monotonic() + within_s
    while not (result := condition()):
        assert time.monotonic() < deadline, f"not within {within_s} s: {condition}"
        time.sleep(_POLL_INTERVAL_S)
    return result


def events_of(url: str) -> list[JournalEvent]:
    """Return all journal entries of the run."""
    result: list[JournalEvent] = []

    def take(_slot: int, _body: bytes, entry: JournalEntry) -> None:
        result.append(entry.event)

    journal = Journal(open_store(url), ignore_view_cache=True)
    journal.on_entry = take
    journal.catch_up()
    return result


def end_waiting_machines(root: LocalCloudDir) -> None:
    """End the machines of a local cloud. Fails if a process or directory remains."""

    def has_none_alive() -> bool:
        # Again: processes that were starting missed the first signal.
        machine_pool.dismiss_machines(root, current_process())
        return not any(machine.is_alive for machine in root.machines())

    eventually(has_none_alive, within_s=20.0)
    root.collect_garbage()
    assert not root.path.exists(), list(root.path.rglob("*"))


class LiveTestCloud:
    """Buckets, machines and runs of one test.

    With `shared_root`, runs use the waiting machines of earlier tests, as successive calls of
    `fit()` do; the owner of that root ends them.
    """

    def __init__(self, folder: Path, shared_root: LocalCloudDir | None = None) -> None:
        self.folder = folder
        self.storage = str(folder / "bucket")
        self.marks = folder / "marks"
        """Directory of marks for the synchronization of training functions and tests."""
        self.marks.mkdir()
        self.root = shared_root or LocalCloudDir(folder / "cloud")
        self.reclaimer = Reclaimer(self.root)
        self._has_shared_root = shared_root is not None
        self._drivers: list[DriverProcess] = []
        self._journals: dict[str, Journal] = {}
        """By URL. Reading a journal from its start in every poll would cost much time."""

    # --- runs ----------------------------------------------------------------------------------

    def options(self, **options: Any) -> LocalOptions:
        return LocalOptions(root=str(self.root.path), **options)

    def trainer(
        self,
        fn: Callable[..., Any],
        *,
        workers: int | tuple[int, int] = 1,
        nodes: int = 1,
        max_failures: int = 0,
        config: dict[str, Any] | None = None,
        name: str | None = "run",
        trainer_type: type[spotfit.DataParallelTrainer] = spotfit.DataParallelTrainer,
        local_options: dict[str, Any] | None = None,
        scaling_options: dict[str, Any] | None = None,
        storage: str | None = None,
        validation: spotfit.ValidationConfig | None = None,
        datasets: dict[str, Any] | None = None,
        **run: Any,
    ) -> spotfit.DataParallelTrainer:
        """Return a trainer on this cloud; `run` are arguments of its `RunConfig`."""
        run.setdefault("failure_config", spotfit.FailureConfig(max_failures=max_failures))
        return trainer_type(
            fn,
            train_loop_config={"marks": str(self.marks), **(config or {})},
            scaling_config=spotfit.ScalingConfig(num_workers=workers, **(scaling_options or {})),
            run_config=spotfit.RunConfig(name=name, storage_path=storage or self.storage, **run),
            validation_config=validation,
            datasets=datasets,
            provisioner=self.options(nodes=nodes, **(local_options or {})),
        )

    def fit(self, fn: Callable[..., Any], **options: Any) -> spotfit.Result:
        return self.trainer(fn, **options).fit()

    def submit(self, fn: Callable[..., Any], **options: Any) -> RunHandle:
        return self.trainer(fn, **options).submit()

    def url(self, name: str = "run") -> str:
        return f"{self.storage}/{name}"

    # --- state of bucket and machine ---------------------------------------------------

    def view(self, name: str = "run") -> JournalView:
        if self.url(name) not in self._journals:
            self._journals[self.url(name)] = Journal(open_store(self.url(name)))
        return self._journals[self.url(name)].catch_up()

    def events(self, name: str = "run") -> list[JournalEvent]:
        """All journal entries."""
        return events_of(self.url(name))

    def rounds_opened(self, name: str = "run") -> list[RoundOpened]:
        return [event for event in self.events(name) if isinstance(event, RoundOpened)]

    def rounds_closed(self, name: str = "run") -> list[RoundClosed]:
        return [event for event in self.events(name) if isinstance(event, RoundClosed)]

    def node_of_rank(self, rank: int, name: str = "run") -> LocalNode:
        """Return the node of a rank."""
        round_ = self.view(name).round
        assert round_ is not None
        place = round_.assignment_for_rank(rank)
        return next(
            node
            for node in self.reclaimer.running_nodes()
            if (node.group.token, node.number) == (place.token, place.node)
        )

    def lose_ranks(self, *ranks: int) -> None:
        """Kill the machines of these ranks, each with one worker; no other one can be rented."""
        round_ = self.view().round
        assert round_ is not None
        self.reclaimer.set_capacity(round_.world_size - len(ranks))
        # Found before the first one is killed, which ends the round.
        for node in [self.node_of_rank(rank) for rank in ranks]:
            self.reclaimer.kill(node)

    def wait_for_saves_of(self, size: int) -> None:
        """Wait until a round of that many workers has committed a checkpoint."""

        def has_saved() -> bool:
            view = self.view()
            saved = view.latest_committed_slot > view.round_opened_slot
            return view.round is not None and view.round.world_size == size and saved

        eventually(has_saved)

    def node_of_leader(self, name: str = "run") -> LocalNode:
        view = self.view(name)
        assert view.round is not None
        assert view.leader is not None
        place = view.round.assignment_of(view.leader.leader)
        assert place is not None
        return self.node_of_rank(place.first_rank, name)

    @property
    def is_untouched(self) -> bool:
        """Whether no run has a machine or a journal."""
        assert not self._has_shared_root, "use the fixture cold_cloud"
        bucket = Path(self.storage)
        journals = list(bucket.rglob("*.json")) if bucket.exists() else []
        return not self.root.path.exists() and not journals

    # --- marks ---------------------------------------------------------------------------------

    def wait_for_mark(self, mark: str) -> Path:
        """Wait until a training function has written this mark."""
        path = self.marks / mark
        eventually(path.exists)
        return path

    def write_mark(self, mark: str, text: str = "") -> None:
        """Write a mark for a training function."""
        (self.marks / mark).write_text(text)

    # --- drivers -------------------------------------------------------------------------------

    def driver(self, script: str, *arguments: str) -> DriverProcess:
        """Start a process that runs the script, as a user does."""
        path = self.folder / f"driver{len(self._drivers)}.py"
        path.write_text(textwrap.dedent(script))
        driver = DriverProcess(path, arguments, self)
        self._drivers.append(driver)
        return driver

    # --- cleanup -------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop everything. Fails if a process or directory remains, except waiting machines that
        are shared."""
        for driver in self._drivers:
            driver.kill()
        self._cancel_active_runs()
        self.reclaimer.set_capacity(None)
        if not self._has_shared_root:
            end_waiting_machines(self.root)

    def _cancel_active_runs(self) -> None:
        """Cancel active runs of a failed test."""
        for run in sorted(Path(self.storage).glob("*/.spotfit/journal")):
            with suppress(JournalError):  # corrupted by the test
                if self.view(run.parents[1].name).is_active:
                    spotfit.attach(run.parents[1]).cancel()
        try:
            eventually(lambda: not self._busy_nodes(), within_s=_RELEASE_TIMEOUT_S)
        except AssertionError as error:
            busy = [f"{node.path}: {node.status()}" for node in self._busy_nodes()]
            raise AssertionError("nodes remain: " + "; ".join(busy)) from error
        finally:
            # Also those of nodes that were killed while the others of their group were released.
            self._remove_groups()

    def _remove_groups(self) -> None:
        """Kill the nodes and remove their groups, so that the next test can use the root."""
        for group in list(self.root.groups()):
            for node in group.nodes():
                self.reclaimer.kill(node)
            with self.root.lock():
                group.remove()

    def _busy_nodes(self) -> list[LocalNode]:
        return [
            node
            for group in self.root.groups()
            for node in group.nodes()
            if not node.status().is_terminated
        ]


class DriverProcess:
    """A script that calls `fit()`, in its own process group."""

    def __init__(self, script: Path, arguments: tuple[str, ...], cloud: LiveTestCloud) -> None:
        self._output = script.with_suffix(".out")
        environment = env.copy_environment() | {
            "SPOTFIT_PROVISIONER": f"local?root={cloud.root.path}",
            "STORAGE": cloud.storage,
            "MARKS": str(cloud.marks),
        }
        with self._output.open("wb") as sink:
            self.process = subprocess.Popen(
                [sys.executable, str(script), *arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self._output.read_text()

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        """Send SIGKILL to the driver only."""
        self.process.kill()
        self.process.wait()

    def wait(self) -> int:
        """Wait for the exit code."""
        return self.process.wait(TIMEOUT_S)
