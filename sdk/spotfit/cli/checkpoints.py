"""`spotfit checkpoints`: what a run keeps, what is in it, as a file, and away with it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from spotfit.cli import render
from spotfit.client.kept import export as export_one
from spotfit.client.kept import kept_as, kept_in, remove

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)
Url = Annotated[str, typer.Argument(help="The run's folder: <storage_path>/<name>.")]
Name = Annotated[str, typer.Argument(help="A checkpoint's name; the latest where none is given.")]


@app.command("ls")
def list_all(url: Url) -> None:
    """List the checkpoints a run keeps, the latest last."""
    kept = kept_in(url)
    if not kept:
        render.lines(["The run keeps no checkpoint."])
    render.checkpoints(kept)


@app.command()
def show(url: Url, name: Name = "") -> None:
    """Show what is in a checkpoint."""
    render.checkpoint(kept_as(url, name))


@app.command()
def export(
    url: Url,
    to: Annotated[Path, typer.Argument(help="A file: .safetensors, or .pt for torch.save.")],
    name: Annotated[str, typer.Option(help="A checkpoint's name, else the latest.")] = "",
    everything: Annotated[  # noqa: FBT002 - an option of the command line
        bool, typer.Option("--all", help="The optimizer and all else, too; .pt only.")
    ] = False,
) -> None:
    """Put a model's shards together in one file, which is read without spotfit."""
    told = export_one(url, name, to, everything=everything)
    render.good(f"{told} is in {to}.")


@app.command("rm")
def delete(url: Url, name: Annotated[str, typer.Argument(help="The checkpoint's name.")]) -> None:
    """Delete a checkpoint of a run that has ended."""
    render.good(f"{remove(url, name)} was deleted.")
