"""`spotfit run`: execute a script that is written for torchrun on rented machines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from spotfit.cli import render
from spotfit.client.preload import find_script_modules
from spotfit.client.run_config import RunConfig
from spotfit.client.trainer import DataParallelTrainer, TorchTrainer
from spotfit.core.errors import ConfigError
from spotfit.core.input_checks import ErrorCollector
from spotfit.frameworks.torch.torch_config import TorchConfig
from spotfit.host import env
from spotfit.model.config import FailureConfig, ScalingConfig
from spotfit.worker.script import run_script

# Options of `spotfit run` stand before the script; everything after it belongs to the script.
CONTEXT_SETTINGS = {"allow_interspersed_args": False, "ignore_unknown_options": False}


def run(
    script: Annotated[
        str, typer.Argument(help="The script below the working directory, such as train.py.")
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[-- ARGS]", help="Arguments of the script.")
    ] = None,
    workers: Annotated[
        str, typer.Option(help="Number of processes, or MIN:MAX for an elastic group.")
    ] = "1",
    gpu: Annotated[  # noqa: FBT002 - a flag of the command line
        bool, typer.Option("--gpu", help="Each process needs a GPU.")
    ] = False,
    module: Annotated[  # noqa: FBT002 - a flag of the command line
        bool, typer.Option("--module", "-m", help="SCRIPT is the name of a module.")
    ] = False,
    framework: Annotated[
        str, typer.Option(help="torch sets the variables of torchrun; none needs no torch.")
    ] = "torch",
    provisioner: Annotated[
        str, typer.Option(help="The backend to rent from; default: that of fit().")
    ] = "",
    name: Annotated[
        str, typer.Option(help="Name of the run; the same name continues it. Default: unique.")
    ] = "",
    storage_path: Annotated[
        str, typer.Option(help="Directory or URL for runs; default: ~/spotfit_results.")
    ] = "",
    working_dir: Annotated[
        Path, typer.Option(help="The directory with the code, in which the script is executed.")
    ] = Path(),
    pip: Annotated[
        Path | None, typer.Option(help="Requirements file to install on the machines.")
    ] = None,
    env_vars: Annotated[
        list[str] | None,
        typer.Option(
            "--env",
            metavar="NAME[=VALUE]",
            help="Environment variable of the script, without a value that of this process; "
            "repeatable.",
        ),
    ] = None,
    max_failures: Annotated[
        int, typer.Option(help="Restarts after an error of the script; -1: no limit.")
    ] = 0,
    deadline: Annotated[str, typer.Option(help="Time until the deadline, such as 60h.")] = "",
    training_time: Annotated[
        str, typer.Option(help="Duration with all processes if no machine is lost, such as 40h.")
    ] = "",
    budget: Annotated[float | None, typer.Option(help="Budget in US dollars.")] = None,
    fallback: Annotated[
        str, typer.Option(help="on_demand or never, as in RunConfig; default: by the deadline.")
    ] = "",
    detach: Annotated[  # noqa: FBT002 - a flag of the command line
        bool, typer.Option("--detach", "-d", help="Return after the machines were requested.")
    ] = False,
) -> None:
    """Run a script on rented machines, as torchrun does on those that exist.

    Each process executes the script as __main__ with torchrun's environment variables; the script
    forms its process group itself. The working directory is sent to the machines. A script that
    saves with spotfit.torch.Checkpointer continues after the loss of its machines; others start
    again from the beginning.
    """
    checks = ErrorCollector()
    scaling = checks.check(lambda: ScalingConfig(num_workers=_parse_workers(workers), use_gpu=gpu))
    path = checks.check(lambda: script if module else _script_below(script, working_dir))
    variables = checks.check(lambda: _parse_variables(env_vars or []))
    trainer_type = checks.check(lambda: _trainer_type(framework))
    runtime_env: dict[str, Any] = {"working_dir": str(working_dir), "env_vars": variables or {}}
    if pip is not None:
        runtime_env["pip"] = str(pip)
    run_config = checks.check(
        lambda: RunConfig(
            name=name or None,
            storage_path=storage_path or None,
            failure_config=FailureConfig(max_failures=max_failures),
            worker_runtime_env=runtime_env,
            deadline=deadline or None,
            training_time_s=training_time or None,
            budget_usd=budget,
            fallback=fallback or None,  # type: ignore[arg-type]  # checked by RunConfig
            preload=find_script_modules(working_dir / path, framework=framework)
            if path is not None and not module
            else (),
        )
    )
    checks.raise_all()
    own: dict[str, Any] = {}
    if trainer_type is TorchTrainer:
        own["torch_config"] = TorchConfig(form_group=False)
    assert trainer_type is not None
    trainer = trainer_type(
        run_script,
        train_loop_config={
            "script": path,
            "arguments": _without_separator(arguments or []),
            "is_module": module,
        },
        scaling_config=scaling,
        run_config=run_config,
        provisioner=provisioner or None,
        **own,
    )
    if not detach:
        trainer.fit()
        return
    url = trainer.submit().url
    render.lines([f"follow it with `spotfit follow {url}`"])


def _without_separator(arguments: list[str]) -> list[str]:
    # `spotfit run train.py -- --lr 1`: options end at the script, so that "--" is passed on.
    return arguments[1:] if arguments[:1] == ["--"] else arguments


def _parse_workers(text: str) -> int | tuple[int, int]:
    numbers = text.split(":")
    if len(numbers) > 2 or not all(one.isdecimal() and int(one) for one in numbers):
        raise ConfigError(
            f"--workers={text!r} is not a number of processes.",
            do="Write a number such as 4, or MIN:MAX such as 2:8 for an elastic group.",
        )
    low, *high = map(int, numbers)
    return (low, high[0]) if high else low


def _script_below(script: str, working_dir: Path) -> str:
    """Return the path of the script relative to the directory that is sent to the machines."""
    folder = working_dir.resolve()
    # As torchrun reads it: relative to the current directory. Otherwise to --working-dir.
    found = [path for path in (Path(script), folder / script) if path.is_file()]
    if not found:
        raise ConfigError(
            f"The script {script!r} does not exist.",
            do="Pass the path of a Python file, or --module with the name of a module.",
        )
    path = next((one for one in found if one.resolve().is_relative_to(folder)), None)
    if path is None:
        raise ConfigError(
            f"The script {script!r} is not below the working directory {str(folder)!r}, so that it "
            "would not be sent to the machines.",
            do="Set --working-dir to a directory that contains the script and its modules.",
        )
    return path.resolve().relative_to(folder).as_posix()


def _parse_variables(texts: list[str]) -> dict[str, str]:
    # Without a value, so that secrets need not be arguments, which other users of a machine see.
    given = [text.partition("=") for text in texts]
    variables = {name: value if has_value else env.lookup(name) for name, has_value, value in given}
    if missing := [name for name, value in variables.items() if value is None]:
        raise ConfigError(
            f"--env {missing[0]}: this process has no environment variable of that name.",
            do="Export the variable, or write --env NAME=VALUE.",
        )
    return {name: value for name, value in variables.items() if value is not None}


def _trainer_type(framework: str) -> type[DataParallelTrainer]:
    types: dict[str, type[DataParallelTrainer]] = {
        "torch": TorchTrainer,
        "none": DataParallelTrainer,
    }
    if framework not in types:
        raise ConfigError(
            f"--framework={framework!r} is unknown.", do="Use torch (the default) or none."
        )
    return types[framework]
