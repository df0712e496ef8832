"""`spotfit estimate`: expected cost and duration of a training, before anything is rented."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from spotfit.cli import json_fields, render
from spotfit.client.run_config import RunConfig
from spotfit.client.trainer import DataParallelTrainer
from spotfit.data.feeders import Feeders
from spotfit.model.config import ScalingConfig


def estimate(
    training_time: Annotated[
        str,
        typer.Option(help="Duration with all workers if no machine is lost, such as 40h."),
    ],
    provisioner: Annotated[
        str, typer.Option(help="The backend to rent from; default: that of fit().")
    ] = "",
    workers: Annotated[int, typer.Option(min=1, help="Number of workers.")] = 1,
    min_workers: Annotated[
        int | None,
        typer.Option(min=1, help="Smallest number of workers of an elastic group."),
    ] = None,
    gpu: Annotated[  # noqa: FBT002 - a flag of the command line
        bool, typer.Option("--gpu", help="Each worker needs a GPU.")
    ] = False,
    feeders: Annotated[
        int, typer.Option(min=0, help="Largest number of machines for feeders.")
    ] = 0,
    min_feeders: Annotated[
        int | None,
        typer.Option(min=0, help="Smallest number of them; default: the largest one."),
    ] = None,
    feeder_cpus: Annotated[
        float, typer.Option(help="Processors of each machine for feeders.")
    ] = 8.0,
    feeder_provisioner: Annotated[
        str, typer.Option(help="The backend of these machines; default: that of the workers.")
    ] = "",
    deadline: Annotated[str, typer.Option(help="Time until the deadline, such as 60h.")] = "",
    budget: Annotated[float | None, typer.Option(help="Budget in US dollars.")] = None,
    fallback: Annotated[
        str, typer.Option(help="on_demand or never, as in RunConfig; default: by the deadline.")
    ] = "",
    changeover: Annotated[
        str, typer.Option(help="Time from a loss to new progress; default: that of the backend.")
    ] = "",
    restart: Annotated[
        str,
        typer.Option(help="How long a change of an elastic group interrupts it; default: 2m."),
    ] = "",
    recordings: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Recorded markets to replay instead of those of spotfit."
        ),
    ] = None,
    as_json: Annotated[  # noqa: FBT002 - an option of the command line
        bool, typer.Option("--json", help="Print JSON for other programs.")
    ] = False,
) -> None:
    """Estimate cost and duration of a training from listed prices and recorded markets.

    Rents nothing. Prints whether the deadline can be guaranteed, the distributions of cost and
    duration, and the offers of the backend. In a script, trainer.estimate() does the same.
    """
    limits: dict[str, Any] = {
        "training_time_s": training_time,
        "deadline": deadline or None,
        "budget_usd": budget,
        "fallback": fallback or None,
    }
    trainer = DataParallelTrainer(
        _train_nothing,
        scaling_config=ScalingConfig(
            num_workers=workers if min_workers is None else (min_workers, workers), use_gpu=gpu
        ),
        run_config=RunConfig(**limits),
        provisioner=provisioner or None,
        # Without datasets there would be nothing for feeders to transform.
        datasets={"train": _no_dataset} if feeders else None,
        data_feeders=Feeders(
            nodes=(feeders if min_feeders is None else min_feeders, feeders),
            cpus=feeder_cpus,
            provisioner=feeder_provisioner or None,
        ),
    )
    result = trainer.estimate(
        changeover=changeover or None, restart=restart or None, recordings=recordings
    )
    if as_json:
        render.json_lines([json_fields.of_estimate(result)])
    else:
        render.lines(str(result).split("\n"))


def _no_dataset() -> None:
    """The dataset of a trainer that only estimates, which is never opened."""


def _train_nothing() -> None:
    """The training function of a trainer that only estimates."""
