"""`spotfit`: look at runs, follow, end and revive them, from wherever the bucket is reached."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from spotfit.cli import checkpoints, render
from spotfit.client.handle import attach
from spotfit.client.request import default_provisioner, parse_provisioner
from spotfit.client.revive import revive
from spotfit.client.story import read_story
from spotfit.core.errors import SpotfitError
from spotfit.provision.checkup import Finding, examine, look
from spotfit.provision.profile import resolve
from spotfit.provision.registry import open_provisioner
from spotfit.store.opening import open_store
from spotfit.store.probe import probe_create

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help=__doc__, pretty_exceptions_enable=False
)
app.add_typer(checkpoints.app, name="checkpoints")
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
def logs(
    url: Url,
    machine: Annotated[
        str,
        typer.Option(
            help="What that machine printed, as its backend kept it: its name in the story "
            "(t-…/0), its number, or 'all'."
        ),
    ] = "",
    last: Annotated[int, typer.Option(help="How many of a machine's last lines.")] = 200,
) -> None:
    """Print what the workers wrote so far, or what a machine printed before its agent spoke."""
    handle = attach(url)
    render.lines(handle.machine_logs(machine, last=last) if machine else handle.logs())


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
    provisioner: Annotated[
        str, typer.Option(help="A provisioner to check; '' is the one fit() would take.")
    ] = "",
) -> None:
    """Check that a provisioner could rent machines, and that a bucket may be trusted with a run.

    Says of each thing that is needed what was found, and of everything that is wrong how to mend
    it; then the exit code is 1. With a bucket, whether machines could reach it is asked, too.
    """
    name, given = parse_provisioner(provisioner or default_provisioner())
    options = resolve(name, given)
    told = ", ".join(f"{option}={options[option]!r}" for option in options) or "no options"
    findings = [Finding(f"the provisioner {name!r}", well=True, found=told)]
    findings += examine(open_provisioner(name, options), storage)
    if storage:
        probe = "can be written, and its `create` has exactly one winner"
        findings.append(look(f"{storage} {probe}", lambda: probe_create(open_store(storage))))
    render.findings(findings)
    if not all(finding.well for finding in findings):
        sys.exit(1)


def main() -> None:
    """The entry point; our errors become a sentence and exit code 2."""
    try:
        app()
    except SpotfitError as problem:
        render.error(problem)
        sys.exit(2)
