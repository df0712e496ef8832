"""Observe, cancel and supervise spotfit runs from any machine with access to their storage."""

from __future__ import annotations

import io
import sys
from collections import deque
from importlib import metadata
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from spotfit.cli import (
    checkpoint_commands,
    estimate_command,
    init_command,
    json_fields,
    render,
    run_command,
)
from spotfit.client.console import read_event_lines, read_events
from spotfit.client.keyring import RunKeyring, open_authenticated
from spotfit.client.request import default_provisioner, parse_provisioner
from spotfit.client.run_config import DEFAULT_STORAGE_PATH
from spotfit.client.run_costs import RunCosts
from spotfit.client.run_handle import attach, supervise_run
from spotfit.client.run_list import list_runs
from spotfit.core.errors import ConfigError, SpotfitError
from spotfit.core.units import parse_seconds
from spotfit.host import log, plugins, system
from spotfit.provision.api import AccountCheck, run_account_checks, run_check
from spotfit.provision.profile import open_provisioner, resolve_options
from spotfit.store.factory import open_store, probe_create

_COMMANDS = "spotfit.commands"
"""The group of entry points whose typer applications are further commands, such as `local`."""


class _CommandGroup(TyperGroup):
    """The commands of this module and those of plugins, which are imported when they are called."""

    # The type of a context is a private one of typer.
    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), *plugins.names(_COMMANDS)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        own = super().get_command(ctx, cmd_name)
        if own is not None or cmd_name not in plugins.names(_COMMANDS):
            return own
        try:
            command = get_command(plugins.load(_COMMANDS, cmd_name))
        except SpotfitError as error:
            return _unavailable_command(cmd_name, error)
        command.name = cmd_name
        return command


def _unavailable_command(name: str, error: SpotfitError) -> TyperCommand:
    """Return a command that raises `error`, so that help and completion show the other commands."""

    def fail() -> None:
        raise error

    arguments = {"ignore_unknown_options": True, "allow_extra_args": True}
    return TyperCommand(
        name,
        callback=fail,
        help=f"Not available: {error.message}",
        context_settings=arguments,
        add_help_option=False,
    )


# typer's own tracebacks would show local variables, which may contain credentials.
app = typer.Typer(
    cls=_CommandGroup, no_args_is_help=True, help=__doc__, pretty_exceptions_enable=False
)
app.add_typer(checkpoint_commands.app, name="checkpoints")
app.command("init")(init_command.init)
app.command("estimate")(estimate_command.estimate)
app.command("run", context_settings=run_command.CONTEXT_SETTINGS)(run_command.run)


def _print_version(is_requested: bool) -> None:  # noqa: FBT001 - called by typer
    if is_requested:
        render.lines([f"spotfit {metadata.version('spotfit')}"])
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[  # noqa: FBT002 - handled by the callback
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    pass


Url = checkpoint_commands.Url
AsJson = checkpoint_commands.AsJson


@app.command("ls")
def list_all(
    root: Annotated[
        str,
        typer.Argument(metavar="STORAGE_PATH", help="The storage_path that contains the runs."),
    ] = DEFAULT_STORAGE_PATH,
    as_json: AsJson = False,  # noqa: FBT002 - an option of the command line
) -> None:
    """List the runs below a storage path: state, start, duration, step, cost and checkpoint."""
    runs = list_runs(root)
    if as_json:
        render.json_lines(map(json_fields.of_listed_run, runs))
    else:
        render.runs(runs, root)


@app.command()
def cost(
    urls: Annotated[
        list[str],
        typer.Argument(
            metavar="URL_OR_STORAGE_PATH",
            help="Directories of runs, or storage paths, all of whose runs count.",
        ),
    ],
    as_json: AsJson = False,  # noqa: FBT002 - an option of the command line
) -> None:
    """Show what the machines of runs have cost, and the sum, by offer. A run counts once.

    Certain and maximum cost in US dollars, without disks, storage, network traffic, taxes and
    discounts. Runs that have not ended count with their cost so far.
    """
    costs = RunCosts(urls)
    if as_json:
        render.json_lines(map(json_fields.of_run_cost, costs))
        render.json_lines([json_fields.of_total_cost(costs.total)])
    else:
        render.costs(costs)


@app.command()
def status(url: Url, as_json: AsJson = False) -> None:  # noqa: FBT002 - an option
    """Show the state of a run: round, workers, machines, checkpoints and failures."""
    handle = attach(url)
    if as_json:
        render.json_lines([json_fields.of_status(handle.status(), handle.url)])
    else:
        render.status(handle.status(), handle.url)


@app.command()
def events(url: Url, as_json: AsJson = False) -> None:  # noqa: FBT002 - an option
    """List all events of a run from its journal: number, local time and description."""
    store = open_authenticated(open_store(url, setting="The URL of the run"))
    if as_json:
        render.json_lines(map(json_fields.of_event, read_events(store)))
    else:
        render.lines(read_event_lines(store))


@app.command()
def logs(
    url: Url,
    machine: Annotated[
        str,
        typer.Option(
            help="Print the console output of this machine, as stored by its backend: its name in "
            "the events (t-…/0), its number, or 'all'."
        ),
    ] = "",
    max_lines: Annotated[
        int, typer.Option(min=1, help="Maximum number of lines per machine, with --machine.")
    ] = 200,
    rank: Annotated[
        int | None, typer.Option(min=0, help="Only the output of the worker with this world rank.")
    ] = None,
    since: Annotated[
        str, typer.Option(help="Only output of this duration before now, such as 90s, 10m or 2h.")
    ] = "",
    tail: Annotated[
        int | None,
        typer.Option(min=1, help="Only the last lines of the output so far, at most this many."),
    ] = None,
    follow: Annotated[  # noqa: FBT002 - an option of the command line
        bool,
        typer.Option("--follow", "-f", help="Wait for further output until the run has ended."),
    ] = False,
    timestamps: Annotated[  # noqa: FBT002 - an option of the command line
        bool, typer.Option("--timestamps", help="Print the local time of each line.")
    ] = False,
) -> None:
    """Print the output of all workers ordered by time, or with --machine that of machines."""
    given = {"--tail": tail, "--rank": rank, "--since": since or None, "--follow": follow or None}
    if machine and (worker_options := [name for name, value in given.items() if value is not None]):
        raise ConfigError(
            f"{', '.join(worker_options)} cannot be combined with --machine: the output of a "
            "machine is not divided by rank or time.",
            do="Use --max-lines with --machine, or omit --machine.",
        )
    if tail is not None and follow:
        raise ConfigError(
            f"--tail {tail} cannot be combined with --follow.", do="Use --since 10m with --follow."
        )
    since_s = parse_seconds(since, setting=f"--since {since}") if since else None
    handle = attach(url)
    if machine:
        render.lines(handle.machine_logs(machine, max_lines=max_lines))
        return
    found = handle.logs(rank=rank, since_s=since_s, follow=follow, timestamps=timestamps)
    render.lines(found if tail is None else deque(found, maxlen=tail))


@app.command()
def metrics(
    url: Url,
    csv: Annotated[  # noqa: FBT002 - an option of the command line
        bool, typer.Option("--csv", help="Print comma-separated values, one column per metric.")
    ] = False,
    as_json: AsJson = False,  # noqa: FBT002 - an option of the command line
) -> None:
    """Print the metrics of all reports of rank 0, one line per report.

    A round that was started after a failure repeats the steps since its checkpoint.
    """
    if csv and as_json:
        raise ConfigError("--csv cannot be combined with --json.", do="Choose one of them.")
    reports = attach(url).metrics()
    if as_json:
        render.json_lines(map(json_fields.of_report, reports))
    elif csv:
        render.metrics_as_csv(reports)
    elif not reports:  # an empty output would look like a failure
        render.lines(["The run has no reports."])
    else:
        render.metrics(reports)


@app.command()
def follow(url: Url) -> None:
    """Wait for the end of a run and show its output. Ctrl-C does not cancel the run.

    If this machine has the run's key, the command also requests new machines if all are lost.
    """
    # watch() installs no signal handler; only fit() cancels the run on Ctrl-C.
    handle = attach(url)
    handle.watch()
    handle.log_summary()


@app.command()
def cancel(
    url: Url,
    save: Annotated[  # noqa: FBT002 - a flag of the command line
        bool, typer.Option(help="Whether a Checkpointer of the run saves first.")
    ] = True,
) -> None:
    """Request the end of a run and the release of its machines; does not wait for it."""
    handle = attach(url)
    if (state := handle.status().state) in ("finished", "failed", "cancelled"):
        render.success(f"The run has ended already: {state}.")
        return
    handle.cancel("spotfit cancel", save=save)
    render.success("Cancellation was requested.")


@app.command()
def sweep(
    url: Url,
    duration_s: Annotated[float, typer.Option(min=0.0, help="Maximum duration in seconds.")] = 60.0,
) -> None:
    """Request machines for a run that lost all of them; release those of a run that has ended.

    For cron jobs: returns after the duration, or earlier if nothing is left to do. The run's key
    must be on this machine, or in SPOTFIT_RUN_SECRET with its id in SPOTFIT_RUN_ID.
    """
    render.success(supervise_run(url, duration_s=duration_s))


@app.command("keys")
def list_keys(
    prune: Annotated[  # noqa: FBT002 - a flag of the command line
        bool, typer.Option("--prune", help="Delete the keys whose runs do not exist any more.")
    ] = False,
) -> None:
    """List the run keys on this machine: id, state and URL of each run."""
    keyring = RunKeyring()
    for key in keyring.list_keys(now=system.wall_ms() / 1000):
        is_pruned = prune and key.state == "unused"
        if is_pruned:
            keyring.remove(key.run_id)
        state = "deleted" if is_pruned else key.state
        render.lines([f"{key.run_id}  {state}  {key.url or '-'}  ({key.detail})"])


@app.command()
def doctor(
    storage: Annotated[str, typer.Option(help="The storage_path to check.")] = "",
    provisioner: Annotated[
        str, typer.Option(help="The provisioner to check; default: that of fit().")
    ] = "",
) -> None:
    """Check that a provisioner can rent machines, and that a storage_path is suitable for runs.

    Prints each requirement, what was found, and how to fix problems. With --storage it also checks
    that machines can reach the storage. The exit code is 1 if a check failed.
    """
    # Resolved like in fit(), so that the check is about the same settings.
    name, explicit_options = parse_provisioner(provisioner or default_provisioner())
    options = resolve_options(name, explicit_options)
    detail = ", ".join(f"{option}={options[option]!r}" for option in options) or "no options"
    findings = [AccountCheck(f"provisioner {name!r}", passed=True, detail=detail)]
    # Invalid names and options have raised an error above; problems from here on are findings.
    findings += run_account_checks(open_provisioner(name, options), storage)
    if storage:
        title = f"{storage} is writable and its `create` is atomic"
        findings.append(
            run_check(title, lambda: probe_create(open_store(storage, setting="--storage")))
        )
    render.findings(findings)
    if not all(finding.passed for finding in findings):
        sys.exit(1)


def main() -> None:
    """Run the command line `spotfit` and exit the process.

    A `SpotfitError` is printed without a traceback; exit code 2.
    """
    log.use_default_handler()
    for stream in (sys.stdout, sys.stderr):
        # Redirected output has the code page of the system on Windows, which lacks '✓'.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        app()
    except SpotfitError as error:
        render.error(error)
        sys.exit(2)
