"""`spotfit`: look at runs, follow, end and revive them, from wherever the bucket is reached."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from spotfit.cli import render
from spotfit.client.handle import attach
from spotfit.client.request import parse_provisioner
from spotfit.client.revive import revive
from spotfit.client.story import read_story
from spotfit.core.errors import SpotfitError
from spotfit.provision.registry import open_provisioner
from spotfit.store.opening import open_store
from spotfit.store.probe import probe_create

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help=__doc__, pretty_exceptions_enable=False
)
Url = Annotated[str, typer.Argument(help="The run's folder: <storage_path>/<name>.")]


@app.command()
def status(url: Url) -> None:
    """Show a run at a glance."""
    handle = attach(url)
    render.status(handle.status(), handle.url)


@app.command()
def story(url: Url) -> None:
    """Tell what happened, entry by entry."""
    render.lines(read_story(open_store(url)))


@app.command()
def logs(url: Url) -> None:
    """Print what the workers wrote so far."""
    render.lines(attach(url).logs())


@app.command()
def follow(url: Url) -> None:
    """Wait for the run's end, showing its output; Ctrl-C only ends the looking."""
    attach(url).watch()


@app.command()
def cancel(url: Url) -> None:
    """Ask a run to end; its machines are let go."""
    attach(url).cancel("spotfit cancel")
    render.good("The run was asked to end.")


@app.command()
def sweep(
    url: Url, for_s: Annotated[float, typer.Option(help="How long to look, in seconds.")] = 60.0
) -> None:
    """Revive a run whose machines are all gone, and let go what a finished one left behind."""
    render.good(revive(url, for_s=for_s))


@app.command()
def doctor(
    storage: Annotated[str, typer.Option(help="A storage_path to check.")] = "",
    provisioner: Annotated[str, typer.Option(help="A provisioner to check.")] = "local",
) -> None:
    """Check that a bucket may be trusted with a run, and that a provisioner can be had."""
    name, options = parse_provisioner(provisioner)
    open_provisioner(name, options)
    render.good(f"The provisioner {provisioner!r} is installed.")
    if storage:
        probe_create(open_store(storage))
        render.good(f"{storage} can be written, and its `create` has exactly one winner.")


def main() -> None:
    """The entry point; our errors become a sentence and exit code 2."""
    try:
        app()
    except SpotfitError as problem:
        render.error(problem)
        sys.exit(2)
