"""The whole story in a minute: handwritten digits, four workers on two nodes, both nodes lost.

Real data, a small convolutional net, checkpoints in an S3 server on loopback. One node is
reclaimed with notice, one is killed without a word; then the same training runs undisturbed, and
the two results must be equal, bit for bit. `make demo` runs it.

For a cloud, change `provisioner=` and `storage_path=`; nothing else.
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
from spotfit.client.story import tell
from spotfit.ledger.journal import Journal
from spotfit.model.events import (
    CheckpointCommitted,
    CheckpointDropped,
    Entry,
    RoundClosed,
    RoundOpened,
)
from spotfit.store.opening import open_store
from spotfit.torch import TorchTrainer, prepare_model
from spotfit_localsim.live.options import LocalOptions
from spotfit_localsim.live.reclaimer import Reclamation, at_step, reclaiming

WORKERS, NODES = 4, 2
BATCH, EPOCHS, SAVE_EVERY = 16, 40, 20
SEED = 7
BUCKET = "spotfit-demo"
PLAN = [at_step(60, node=1, notice_s=8.0), at_step(640, node=0)]
GOOD = 0.97
console = Console()


# --- what is trained --------------------------------------------------------------------------


def train(config: dict[str, Any]) -> float:
    """On every worker: go on from the last checkpoint, and return the accuracy at the end."""
    import numpy as np
    import torch
    from torch import nn

    torch.use_deterministic_algorithms(mode=True)
    torch.set_num_threads(1)
    torch.manual_seed(config["seed"])
    context = spotfit.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    images, labels = (torch.from_numpy(config[part]) for part in ("images", "labels"))

    # Buckets that are never rearranged add up in the same order after a restart.
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
        epoch, place = divmod(step, per_epoch)
        order = np.random.default_rng((config["seed"], epoch)).permutation(len(images))
        chosen = order[place * world_size + rank :: per_epoch * world_size][: config["batch"]]
        loss: Any = nn.functional.cross_entropy(model(images[chosen]), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        metrics = {"step": step + 1, "epoch": epoch, "loss": round(loss.item(), 4)}
        note(config["diary"], rank, metrics)
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
            mine = spotfit.Checkpoint.from_directory(directory) if rank == 0 else None
            spotfit.report(metrics, checkpoint=mine)
    with torch.no_grad():
        guesses = model.module(torch.from_numpy(config["held_out"])).argmax(dim=1)
        return float((guesses == torch.from_numpy(config["held_out_labels"])).float().mean())


def digits_net() -> Any:
    """Two convolutions and a line."""
    from torch import nn

    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 4 * 4, 10)),
    )


def note(diary: str, rank: int, metrics: dict[str, Any]) -> None:
    """For the timeline below: which process made which step, and when."""
    if rank == 0:
        told = (os.getpid(), metrics["step"], time.time_ns() // 1_000_000, metrics["loss"])
        with Path(diary).open("a") as file:
            file.write(" ".join(map(str, told)) + "\n")


def digits() -> dict[str, Any]:
    """1,797 images of 8 × 8 points; every fifth is held out."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images = (found.images / 16.0).astype("float32")[:, None]
    labels = found.target.astype("int64")
    held_out = [n % 5 == 0 for n in range(len(images))]
    trained = [not held for held in held_out]
    return {
        "images": images[trained],
        "labels": labels[trained],
        "held_out": images[held_out],
        "held_out_labels": labels[held_out],
    }


# --- where, and what befalls it ---------------------------------------------------------------


def main() -> int:
    """Train through two losses, train undisturbed, compare. 0 if everything holds."""
    with tempfile.TemporaryDirectory(prefix="spotfit-demo-") as folder, s3_server(Path(folder)):
        data = digits()
        disturbed = Training("digits", Path(folder), data)
        with reclaiming(disturbed.url, PLAN, options=disturbed.machines, seed=SEED) as market:
            disturbed.run(market)
        undisturbed = Training("undisturbed", Path(folder), data)
        undisturbed.run(None)
        console.print(timeline(disturbed, market))
        return 0 if report_checks(disturbed, undisturbed, market) else 1


class Training:
    """One `fit()`, watched while it runs."""

    def __init__(self, name: str, folder: Path, data: dict[str, Any]) -> None:
        storage = f"s3://{BUCKET}/runs"
        self.url = f"{storage}/{name}"
        self.diary = folder / f"{name}.diary"
        self.machines = LocalOptions(nodes=NODES, root=str(folder / "machines"))
        self.trainer = TorchTrainer(
            train,
            train_loop_config={
                **data,
                "diary": str(self.diary),
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
        self.news: list[str] = []
        self.closed: list[Entry] = []
        """The ends of rounds, as the journal tells them."""
        self.committed: list[str] = []
        self.passed_over: list[str] = []
        """Checkpoints that were committed and not used: nothing may ever stand here."""
        self._journal: Journal | None = None

    def run(self, market: Reclamation | None) -> None:
        """To the end, with a view of what goes on."""
        began_ns = time.monotonic_ns()
        handle = self.trainer.submit()
        ended = threading.Event()
        watching = threading.Thread(target=self._show, args=(handle, market, ended))
        watching.start()
        try:
            self.result = handle.result()
        finally:
            ended.set()
            watching.join()
            console.print()
        self.seconds = (time.monotonic_ns() - began_ns) / 1e9

    def _show(
        self, handle: spotfit.RunHandle, market: Reclamation | None, ended: threading.Event
    ) -> None:
        with Live(console=console, refresh_per_second=8) as live:
            while True:
                over = ended.wait(0.2)
                self.read_on()
                live.update(view(self, handle, market))
                if over:
                    return

    def read_on(self) -> None:
        """What the run's journal says since the last look."""
        if self._journal is None:
            self._journal = Journal(open_store(self.url), whole=True)
            self._journal.heard = self._hear
        self._journal.catch_up()

    def _hear(self, _slot: int, _body: bytes, entry: Entry) -> None:
        match entry.event:
            case CheckpointCommitted(name=name):
                self.committed.append(name)
            case RoundClosed():
                self.closed.append(entry)
            case RoundOpened(round=opened):
                if self.committed and self.committed[-1] != opened.checkpoint:
                    self.passed_over.append(self.committed[-1])
        if not isinstance(entry.event, CheckpointDropped):
            self.news.append(tell(entry.event))

    def steps(self) -> list[Step]:
        """What rank 0 wrote into its diary."""
        lines = self.diary.read_text().splitlines() if self.diary.exists() else []
        told = [line.split() for line in lines]
        return [Step(int(pid), int(step), int(at), loss) for pid, step, at, loss in told]

    def weights(self) -> dict[str, Any]:
        """Of the last checkpoint."""
        import torch

        assert self.result.checkpoint is not None
        with self.result.checkpoint.as_directory() as directory:
            return dict(torch.load(Path(directory, "state.pt"))["model"])


@contextmanager
def s3_server(folder: Path) -> Iterator[None]:
    """A real S3 server on loopback, and the environment that leads to it."""
    from urllib.request import Request, urlopen

    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    os.environ.update(  # noqa: TID251  # as a user's shell would
        AWS_ENDPOINT_URL=f"http://{host}:{port}",
        AWS_ACCESS_KEY_ID="demo",
        AWS_SECRET_ACCESS_KEY="demo",  # noqa: S106  # the server asks for none
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


# --- what is shown ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """A step that was made: by which process, and when."""

    pid: int
    step: int
    at_ms: int
    loss: str


def view(training: Training, handle: spotfit.RunHandle, market: Reclamation | None) -> Table:
    """The run at this moment."""
    status, steps = handle.status(), training.steps()
    table = Table(title=f"{status.name}: {status.state}", title_justify="left", show_header=False)
    table.add_row("round", f"{status.round or '-'}, {status.workers} workers")
    table.add_row("machines", str(status.machines))
    table.add_row("step", f"{steps[-1].step}, loss {steps[-1].loss}" if steps else "-")
    table.add_row("checkpoints", f"{len(training.committed)} committed")
    for struck in market.done if market else ():
        how = "was told that it will go" if struck.announced else "was killed without a word"
        table.add_row("market", f"after step {struck.step} a node {how}")
    for line in training.news[-4:]:
        table.add_row("journal", line)
    return table


def timeline(training: Training, market: Reclamation) -> Table:
    """Every round: when and what it trained, who was lost, and what that cost."""
    table = Table(title="Rounds", title_justify="left")
    for column in ("round", "from", "steps", "what ended it", "to the next step", "done again"):
        table.add_column(column, justify="left" if column.startswith("what") else "right")
    rounds = split_by_process(training.steps())
    began_ms = rounds[0][0].at_ms
    for number, steps in enumerate(rounds):
        since = f"{(steps[0].at_ms - began_ms) / 1000:.1f} s"
        row = [str(number + 1), since, f"{steps[0].step}-{steps[-1].step}"]
        if number + 1 < len(rounds):
            following = rounds[number + 1]
            why, at_ms = what_ended(training.closed[number], steps, market)
            again = steps[-1].step - following[0].step + 1
            row += [why, f"{(following[0].at_ms - at_ms) / 1000:.2f} s", f"{again} steps"]
        table.add_row(*row)
    return table


def split_by_process(steps: list[Step]) -> list[list[Step]]:
    """A new process of rank 0 is a new round."""
    rounds: list[list[Step]] = []
    for step in steps:
        if not rounds or rounds[-1][-1].pid != step.pid:
            rounds.append([])
        rounds[-1].append(step)
    return rounds


def what_ended(closed: Entry, steps: list[Step], market: Reclamation) -> tuple[str, int]:
    """Why a round ended, and since when nobody trained: from the kill, or from the last step of
    a group that changed over to the replacement."""
    assert isinstance(closed.event, RoundClosed)
    within = [struck for struck in market.done if steps[0].at_ms < struck.at_ms <= closed.at_ms]
    for struck in within:
        if not struck.announced:
            return f"{struck.token}/{struck.node} was killed without a word", struck.at_ms
    warned = ", ".join(f"{struck.token}/{struck.node}" for struck in within)
    return f"{warned} had notice: {closed.event.why}", steps[-1].at_ms


def report_checks(disturbed: Training, undisturbed: Training, market: Reclamation) -> bool:
    """Print what must hold, and whether it does."""
    import torch

    ours, theirs = disturbed.weights(), undisturbed.weights()
    same = all(torch.equal(ours[name], theirs[name]) for name in theirs)
    accuracy = float(disturbed.result.return_value)
    made = [step.step for step in disturbed.steps()]
    all_made = set(made) == {step.step for step in undisturbed.steps()}
    again, saved = len(made) - len(set(made)), len(disturbed.committed)
    checks = {
        f"accuracy on held-out images is {accuracy:.4f}, at least {GOOD}": accuracy >= GOOD,
        "the final weights are those of the undisturbed run, bit for bit": same,
        f"{len(market.done)} of {len(PLAN)} reclaims happened": len(market.done) == len(PLAN),
        f"all {len(set(made))} steps were made, {again} of them again after a loss": all_made,
        f"{saved} checkpoints were committed, none was lost": not disturbed.passed_over,
    }
    for what, holds in checks.items():
        console.print(f"[{'green' if holds else 'red'}]{'✓' if holds else '✗'}[/] {what}")
    console.print(f"{disturbed.seconds:.1f} s with two losses, {undisturbed.seconds:.1f} s without")
    return all(checks.values())


if __name__ == "__main__":
    sys.exit(main())
