"""Demo in a minute: handwritten digits, four workers on two nodes, and both nodes are lost.

Real data, a small convolutional network, checkpoints in an S3 server on loopback. One node is
preempted with notice, one is killed without notice; then the same training runs undisturbed, and
the two results must be bit-identical. `make demo` runs it.

For a cloud, change `provisioner=` and `storage_path=` only.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

import spotfit
from spotfit.client.console import format_event
from spotfit.ledger.journal import Journal
from spotfit.model.events import (
    CheckpointCommitted,
    CheckpointDropped,
    JournalEntry,
    RoundClosed,
    RoundOpened,
)
from spotfit.store.factory import open_store
from spotfit.torch import TorchTrainer, prepare_model
from spotfit_localsim.live.preemption import ReclaimSchedule, at_step, scheduled_reclaims
from spotfit_provisioners.local.options import LocalOptions

WORKERS, NODES = 4, 2
BATCH, EPOCHS, SAVE_EVERY = 16, 40, 20
SEED = 7
BUCKET = "spotfit-demo"
PLAN = [at_step(60, node=1, notice_s=8.0), at_step(640, node=0)]
MIN_ACCURACY = 0.97
console = Console()


# --- training ------------------------------------------------------------------------------


def train(config: dict[str, Any]) -> float:
    """Resume from the last checkpoint, train, and return the final accuracy."""
    import numpy as np
    import torch
    from torch import nn

    torch.use_deterministic_algorithms(mode=True)
    torch.set_num_threads(1)
    torch.manual_seed(config["seed"])
    context = spotfit.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    images, labels = (torch.from_numpy(config[part]) for part in ("images", "labels"))

    # DDP must not rebuild its buckets: sums would change their order after a restart.
    model: Any = prepare_model(
        digits_net(), parallel_strategy_kwargs={"find_unused_parameters": True}
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    done = 0
    if checkpoint := spotfit.get_checkpoint():
        with checkpoint.as_directory() as directory:
            saved = torch.load(Path(directory, "state.pt"))
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        done = saved["step"]

    per_epoch = len(images) // (config["batch"] * world_size)
    for step in range(done, per_epoch * config["epochs"]):
        epoch, batch_index = divmod(step, per_epoch)
        order = np.random.default_rng((config["seed"], epoch)).permutation(len(images))
        indices = order[batch_index * world_size + rank :: per_epoch * world_size][
            : config["batch"]
        ]
        loss: Any = nn.functional.cross_entropy(model(images[indices]), labels[indices])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        metrics = {"step": step + 1, "epoch": epoch, "loss": round(loss.item(), 4)}
        record_step(config["step_log"], rank, metrics)
        if (step + 1) % config["save_every"]:
            spotfit.report(metrics)
            continue
        with tempfile.TemporaryDirectory() as directory:
            if rank == 0:
                state = {
                    "model": model.module.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "step": step + 1,
                }
                torch.save(state, Path(directory, "state.pt"))
            reported_checkpoint = (
                spotfit.Checkpoint.from_directory(directory) if rank == 0 else None
            )
            spotfit.report(metrics, checkpoint=reported_checkpoint)
    with torch.no_grad():
        predictions = model.module(torch.from_numpy(config["held_out"])).argmax(dim=1)
        return float((predictions == torch.from_numpy(config["held_out_labels"])).float().mean())


def digits_net() -> Any:
    """Return two convolutions and a linear layer."""
    from torch import nn

    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 4 * 4, 10)),
    )


def record_step(step_log: str, rank: int, metrics: dict[str, Any]) -> None:
    """Record which process executed the step, and when."""
    if rank == 0:
        fields = (os.getpid(), metrics["step"], time.time_ns() // 1_000_000, metrics["loss"])
        with Path(step_log).open("a") as file:
            file.write(" ".join(map(str, fields)) + "\n")


def digits() -> dict[str, Any]:
    """Load 1,797 images of 8 × 8 pixels; every fifth is held out."""
    from sklearn.datasets import load_digits

    dataset = load_digits()
    images = (dataset.images / 16.0).astype("float32")[:, None]
    labels = dataset.target.astype("int64")
    held_out = [n % 5 == 0 for n in range(len(images))]
    trained = [not held for held in held_out]
    return {
        "images": images[trained],
        "labels": labels[trained],
        "held_out": images[held_out],
        "held_out_labels": labels[held_out],
    }


# --- runs and preemptions ------------------------------------------------------------------


def main() -> int:
    """Train with two preemptions, train undisturbed, and compare. Returns 0 if all checks pass."""
    with tempfile.TemporaryDirectory(prefix="spotfit-demo-") as folder, s3_server(Path(folder)):
        data = digits()
        disturbed = DemoRun("digits", Path(folder), data)
        with scheduled_reclaims(
            disturbed.url, PLAN, options=disturbed.machines, seed=SEED
        ) as schedule:
            disturbed.run(schedule)
        undisturbed = DemoRun("undisturbed", Path(folder), data)
        undisturbed.run(None)
        console.print(timeline(disturbed, schedule))
        return 0 if report_checks(disturbed, undisturbed, schedule) else 1


class DemoRun:
    """One `fit()`, displayed while it runs."""

    def __init__(self, name: str, folder: Path, data: dict[str, Any]) -> None:
        storage = f"s3://{BUCKET}/runs"
        self.url = f"{storage}/{name}"
        self.step_log = folder / f"{name}.step_log"
        self.machines = LocalOptions(nodes=NODES, root=str(folder / "machines"))
        self.trainer = TorchTrainer(
            train,
            train_loop_config={
                **data,
                "step_log": str(self.step_log),
                "batch": BATCH,
                "epochs": EPOCHS,
                "save_every": SAVE_EVERY,
                "seed": SEED,
            },
            scaling_config=spotfit.ScalingConfig(num_workers=WORKERS),
            run_config=spotfit.RunConfig(
                name=name,
                storage_path=storage,
                checkpoint_config=spotfit.CheckpointConfig(num_to_keep=3),
            ),
            provisioner=self.machines,
        )
        self.result: spotfit.Result
        self.seconds = 0.0
        self.event_lines: list[str] = []
        self.closed: list[JournalEntry] = []
        """The journal entries of closed rounds."""
        self.committed: list[str] = []
        self.unused_checkpoints: list[str] = []
        """Committed checkpoints that the next round did not restore; must stay empty."""
        self._journal: Journal | None = None

    def run(self, schedule: ReclaimSchedule | None) -> None:
        """Run to the end, with a live display."""
        started_ns = time.monotonic_ns()
        handle = self.trainer.submit()
        ended = threading.Event()
        display = threading.Thread(target=self._show, args=(handle, schedule, ended))
        display.start()
        try:
            self.result = handle.result()
        finally:
            ended.set()
            display.join()
            console.print()
        self.seconds = (time.monotonic_ns() - started_ns) / 1e9

    def _show(
        self, handle: spotfit.RunHandle, schedule: ReclaimSchedule | None, ended: threading.Event
    ) -> None:
        with Live(console=console, refresh_per_second=8) as live:
            while True:
                is_over = ended.wait(0.2)
                self.catch_up_journal()
                live.update(view(self, handle, schedule))
                if is_over:
                    return

    def catch_up_journal(self) -> None:
        """Apply new entries of the run's journal."""
        if self._journal is None:
            self._journal = Journal(open_store(self.url), ignore_view_cache=True)
            self._journal.on_entry = self._on_entry
        self._journal.catch_up()

    def _on_entry(self, _slot: int, _body: bytes, entry: JournalEntry) -> None:
        match entry.event:
            case CheckpointCommitted(name=name):
                self.committed.append(name)
            case RoundClosed():
                self.closed.append(entry)
            case RoundOpened(round=opened):
                if self.committed and self.committed[-1] != opened.checkpoint_name:
                    self.unused_checkpoints.append(self.committed[-1])
        if not isinstance(entry.event, CheckpointDropped):
            self.event_lines.append(format_event(entry.event))

    def steps(self) -> list[RecordedStep]:
        """Return the steps that rank 0 recorded."""
        lines = self.step_log.read_text().splitlines() if self.step_log.exists() else []
        rows = [line.split() for line in lines]
        return [RecordedStep(int(pid), int(step), int(at), loss) for pid, step, at, loss in rows]

    def weights(self) -> dict[str, Any]:
        """Return the weights of the last checkpoint."""
        import torch

        assert self.result.checkpoint is not None
        with self.result.checkpoint.as_directory() as directory:
            return dict(torch.load(Path(directory, "state.pt"))["model"])


@contextmanager
def s3_server(folder: Path) -> Iterator[None]:
    """Run an S3 server on loopback, and set the environment for it."""
    from urllib.request import Request, urlopen

    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    os.environ.update(  # noqa: TID251  # as a user's shell would
        AWS_ENDPOINT_URL=f"http://{host}:{port}",
        AWS_ACCESS_KEY_ID="demo",
        AWS_SECRET_ACCESS_KEY="demo",  # noqa: S106  # the server checks no credentials
        AWS_REGION="us-east-1",
        AWS_EC2_METADATA_DISABLED="true",
        SPOTFIT_HOME=str(folder / "keys"),
        SPOTFIT_LOG_LEVEL="ERROR",
    )
    urlopen(Request(f"http://{host}:{port}/{BUCKET}", method="PUT")).close()
    try:
        yield
    finally:
        server.stop()


# --- display --------------------------------------------------------------------------------


@dataclass(frozen=True)
class RecordedStep:
    """An executed step."""

    pid: int
    step: int
    at_ms: int
    loss: str


def view(training: DemoRun, handle: spotfit.RunHandle, schedule: ReclaimSchedule | None) -> Table:
    """Return the current state of the run as a table."""
    status, steps = handle.status(), training.steps()
    table = Table(title=f"{status.name}: {status.state}", title_justify="left", show_header=False)
    table.add_row("round", f"{status.round or '-'}, {status.workers} workers")
    table.add_row("machines", str(status.machines))
    table.add_row("step", f"{steps[-1].step}, loss {steps[-1].loss}" if steps else "-")
    table.add_row("checkpoints", f"{len(training.committed)} committed")
    for reclaim in schedule.completed if schedule else ():
        how = "received a preemption notice" if reclaim.notice else "was killed without notice"
        table.add_row("preemption", f"after step {reclaim.step} a node {how}")
    for line in training.event_lines[-4:]:
        table.add_row("journal", line)
    return table


def timeline(training: DemoRun, schedule: ReclaimSchedule) -> Table:
    """Return a table of the rounds: steps, cause of the end, and the cost."""
    table = Table(title="Rounds", title_justify="left")
    for column in ("round", "from", "steps", "ended by", "to the next step", "repeated"):
        table.add_column(column, justify="left" if column == "ended by" else "right")
    rounds = split_by_process(training.steps())
    started_ms = rounds[0][0].at_ms
    for number, steps in enumerate(rounds):
        start = f"{(steps[0].at_ms - started_ms) / 1000:.1f} s"
        row = [str(number + 1), start, f"{steps[0].step}-{steps[-1].step}"]
        if number + 1 < len(rounds):
            following = rounds[number + 1]
            cause, at_ms = cause_of_end(training.closed[number], steps, schedule)
            repeated = steps[-1].step - following[0].step + 1
            row += [cause, f"{(following[0].at_ms - at_ms) / 1000:.2f} s", f"{repeated} steps"]
        table.add_row(*row)
    return table


def split_by_process(steps: list[RecordedStep]) -> list[list[RecordedStep]]:
    """Group the steps by round: each round has a new rank 0 process."""
    rounds: list[list[RecordedStep]] = []
    for step in steps:
        if not rounds or rounds[-1][-1].pid != step.pid:
            rounds.append([])
        rounds[-1].append(step)
    return rounds


def cause_of_end(
    closed: JournalEntry, steps: list[RecordedStep], schedule: ReclaimSchedule
) -> tuple[str, int]:
    """Return why a round ended, and since when no step was executed.

    That is the kill, or the last step of a group that switched to the replacement.
    """
    assert isinstance(closed.event, RoundClosed)
    reclaims = [
        reclaim
        for reclaim in schedule.completed
        if steps[0].at_ms < reclaim.at_ms <= closed.written_at_ms
    ]
    for reclaim in reclaims:
        if not reclaim.notice:
            return f"{reclaim.token}/{reclaim.node} was killed without notice", reclaim.at_ms
    nodes = ", ".join(f"{reclaim.token}/{reclaim.node}" for reclaim in reclaims)
    return f"{nodes} had notice: {closed.event.reason}", steps[-1].at_ms


def report_checks(disturbed: DemoRun, undisturbed: DemoRun, schedule: ReclaimSchedule) -> bool:
    """Print the checks; return whether all passed."""
    import torch

    disturbed_weights, undisturbed_weights = disturbed.weights(), undisturbed.weights()
    same = all(
        torch.equal(disturbed_weights[name], undisturbed_weights[name])
        for name in undisturbed_weights
    )
    accuracy = float(disturbed.result.return_value)
    executed = [step.step for step in disturbed.steps()]
    all_executed = set(executed) == {step.step for step in undisturbed.steps()}
    repeated, saved = len(executed) - len(set(executed)), len(disturbed.committed)
    checks = {
        f"accuracy on held-out images is {accuracy:.4f}, at least {MIN_ACCURACY}": accuracy
        >= MIN_ACCURACY,
        "the final weights are bit-identical to the undisturbed run": same,
        f"{len(schedule.completed)} of {len(PLAN)} preemptions happened": len(schedule.completed)
        == len(PLAN),
        f"all {len(set(executed))} steps were executed, {repeated} of them twice": all_executed,
        f"{saved} checkpoints were committed, none was lost": not disturbed.unused_checkpoints,
    }
    for what, passed in checks.items():
        console.print(f"[{'green' if passed else 'red'}]{'✓' if passed else '✗'}[/] {what}")
    console.print(f"{disturbed.seconds:.1f} s with two losses, {undisturbed.seconds:.1f} s without")
    return all(checks.values())


if __name__ == "__main__":
    sys.exit(main())
