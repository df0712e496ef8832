"""Show and preempt nodes of a run on the `local` backend, as the market of a spot cloud does.

RUN is the directory of a run, `<storage_path>/<name>`. It may be omitted if only one run has nodes.
Nodes of other runs on this machine are not affected.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from spotfit.cli import render
from spotfit.core.errors import ConfigError
from spotfit.core.ids import RunId
from spotfit.core.units import format_seconds
from spotfit.host.system import SystemClock
from spotfit.ledger.journal import read_run_id
from spotfit.store.factory import open_store
from spotfit_localsim.live.preemption import Reclaimer
from spotfit_provisioners.local.options import LocalOptions
from spotfit_provisioners.local.state_dir import LocalCloudDir, LocalNode

_POLL_INTERVAL_S = 0.1

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)
Run = Annotated[
    str, typer.Argument(metavar="RUN", help="Directory of the run: <storage_path>/<name>.")
]
Node = Annotated[
    str,
    typer.Option(help="Name of the node, such as t-…/0, as `ls` prints it; default: the first."),
]
Root = Annotated[str, typer.Option(help="State directory, if LocalOptions(root=...) is set.")]


@app.command("ls")
def list_nodes(run: Run = "", root: Root = "") -> None:
    """List the nodes of a run, or of all runs: id of the run, name, process and state."""
    cloud = _open_cloud(root)
    run_id = _read_run_id(run) if run else None
    groups = [group for group in cloud.groups() if run_id in (None, group.run_id)]
    nodes = [node for group in groups for node in group.nodes()]
    render.lines(_describe(node) for node in nodes)
    if not nodes:
        render.lines([f"There are no nodes in {cloud.path}."])


@app.command()
def notice(
    run: Run = "",
    node: Node = "",
    seconds: Annotated[
        float, typer.Option(min=0.0, help="Time from the notice to the end of the node.")
    ] = LocalOptions().notice_s,
    root: Root = "",
) -> None:
    """Give a node a preemption notice, and kill it when the time is over.

    Waits until then, or until the node has exited. After Ctrl-C the node is not killed.
    """
    reclaimer, chosen = _choose_node(run, node, root)
    reclaimer.notify(chosen, seconds_left=seconds)
    render.success(f"{_name(chosen)} has {format_seconds(seconds)} left.")
    if _wait_for_exit(chosen, timeout_s=seconds):
        render.success(f"{_name(chosen)} has exited.")
        return
    reclaimer.kill(chosen, reason="reclaimed after its notice")
    render.success(f"{_name(chosen)} was killed.")


@app.command()
def kill(run: Run = "", node: Node = "", root: Root = "") -> None:
    """Kill a node with its agent and workers, without a notice."""
    reclaimer, chosen = _choose_node(run, node, root)
    reclaimer.kill(chosen)
    render.success(f"{_name(chosen)} was killed.")


def _open_cloud(root: str) -> LocalCloudDir:
    return LocalCloudDir(Path(root).absolute()) if root else LocalCloudDir.default()


def _choose_node(run: str, name: str, root: str) -> tuple[Reclaimer, LocalNode]:
    """Return the node of that name, or the first, of the run or of the only run."""
    cloud = _open_cloud(root)
    run_id = _read_run_id(run) if run else _only_run(cloud)
    reclaimer = Reclaimer(cloud, run_id)
    nodes = {_name(node): node for node in reclaimer.running_nodes()}
    if not nodes:
        raise ConfigError(
            f"The run {run or run_id} has no running node without a notice in {cloud.path}.",
            do="List the nodes with `spotfit local ls`. Only runs with provisioner='local' have "
            "nodes here; pass --root if LocalOptions(root=...) is set.",
        )
    if name and name not in nodes:
        raise ConfigError(
            f"--node {name}: the run has no running node of this name without a notice.",
            do=f"Pass one of its nodes: {', '.join(nodes)}.",
        )
    return reclaimer, nodes[name or next(iter(nodes))]


def _only_run(cloud: LocalCloudDir) -> RunId:
    run_ids = sorted({node.group.run_id for node in Reclaimer(cloud).running_nodes()})
    if len(run_ids) == 1:
        return run_ids[0]
    problem = "Several runs have nodes" if run_ids else "No run has a node"
    raise ConfigError(
        f"{problem} in {cloud.path}.",
        do="Pass the directory of the run, which fit() prints: <storage_path>/<name>."
        if run_ids
        else "Start one with provisioner='local', or pass --root if LocalOptions(root=...) is set.",
    )


def _read_run_id(url: str) -> RunId:
    run_id = read_run_id(open_store(url, setting="RUN"))
    if run_id is None:
        raise ConfigError(
            f"There is no run at {url}.",
            do="Pass the directory of the run, which fit() prints: <storage_path>/<name>.",
        )
    return run_id


def _name(node: LocalNode) -> str:
    return f"{node.group.token}/{node.number}"


def _describe(node: LocalNode) -> str:
    machine, status = node.machine(), node.status()
    process = f"process {machine.pid}" if machine is not None else "no process"
    state = "with a preemption notice" if node.notice_path.exists() else status.state.value
    return f"run {node.group.run_id}  {_name(node)}  {process}  {state}  {status.reason}".rstrip()


def _wait_for_exit(node: LocalNode, *, timeout_s: float) -> bool:
    """Wait for the end of the node's process; return whether it has ended before the timeout."""
    clock, machine = SystemClock(), node.machine()
    deadline = clock.now() + timeout_s
    while machine is not None and machine.is_alive:
        if clock.now() >= deadline:
            return False
        clock.wait(min(_POLL_INTERVAL_S, deadline - clock.now()))
    return True
