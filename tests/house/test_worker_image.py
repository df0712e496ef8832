"""The worker image: checks that do not need a build."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from spotfit.provision.launch import AGENT_COMMAND
from tests.house.tree import ROOT
from worker_image import dockerfile, pins

IMAGE = ROOT / "worker_image"
KINDS = ("cpu", "cuda")
SCRIPTS = sorted(IMAGE.glob("*.sh"))


def stages(kind: str) -> list[dockerfile.Stage]:
    return dockerfile.read(IMAGE / f"Dockerfile.{kind}", {"PYTHON": "3.12"})


@pytest.mark.parametrize("kind", KINDS)
def test_the_image_starts_the_agent_without_root(kind: str) -> None:
    final = stages(kind)[-1]
    command, entrypoint, user = (
        final.last(instruction) for instruction in ("CMD", "ENTRYPOINT", "USER")
    )
    assert command is not None
    assert command.words() == list(AGENT_COMMAND)
    assert entrypoint is not None
    assert Path(entrypoint.words()[0]).name == "spotfit-entrypoint"
    assert user is not None
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user.rest), "numeric, as runAsNonRoot requires"


@pytest.mark.parametrize("kind", KINDS)
def test_the_image_contains_only_our_files_and_exposes_no_port(kind: str) -> None:
    copied = [
        step.words()[:-1]
        for stage in stages(kind)
        for step in stage.steps
        if step.word == "COPY" and "--from=wheel" not in step.words()
    ]
    files = {word for arguments in copied for word in arguments if not word.startswith("--")}
    expected_files = {"LICENSE", "README.md", "pyproject.toml", "sdk", "provisioners", "localsim"}
    assert files - expected_files == {
        f"worker_image/constraints/{kind}.txt",
        "worker_image/entrypoint.sh",
    }
    assert all((ROOT / name).exists() for name in files)
    included = (ROOT / ".dockerignore").read_text().splitlines()
    assert {name.partition("/")[0] for name in files} <= {
        line[1:] for line in included if line[:1] == "!"
    }
    assert not re.search(r"^EXPOSE", (IMAGE / f"Dockerfile.{kind}").read_text(), re.MULTILINE)


@pytest.mark.parametrize("kind", KINDS)
def test_both_stages_use_the_python_argument(kind: str) -> None:
    assert {stage.base for stage in stages(kind)} == {"python:3.12-slim-bookworm"}


def test_both_dockerfiles_have_the_same_steps() -> None:
    """Dockerfiles have no include, so equal parts are compared."""
    cpu, cuda = ([(step.word, step.rest) for step in stages(kind)[0].steps] for kind in KINDS)
    assert cpu == cuda
    instructions = [
        [step.word for step in stages(kind)[-1].steps if step.word != "ARG"] for kind in KINDS
    ]
    instructions[1].remove("ENV")  # NVIDIA's
    assert instructions[0] == instructions[1]


def test_cpu_pins_are_up_to_date() -> None:
    assert pins.read("cpu") == pins.pinned(), "make pins"
    assert (pins.CONSTRAINTS / "cpu.txt").read_text() == pins.text("cpu", pins.read("cpu"))


def test_cuda_pins_add_only_packages_of_cuda() -> None:
    cpu, cuda = pins.read("cpu"), pins.read("cuda")
    more = cuda.keys() - cpu.keys()
    assert cuda == {**cpu, **{name: cuda[name] for name in more}}, "make pins"
    assert more
    assert all(pins.CUDA.match(name) for name in more)


def test_unknown_instruction_is_rejected(tmp_path: Path) -> None:
    file = tmp_path / "Dockerfile.odd"
    file.write_text("FROM python:3.12\nONBUILD RUN true\n")
    with pytest.raises(ValueError, match="ONBUILD is not supported"):
        dockerfile.read(file, {})


def test_dockerfile_is_parsed_like_docker_does(tmp_path: Path) -> None:
    file = tmp_path / "Dockerfile.odd"
    file.write_text(
        'ARG P=3.11\nFROM a:${P} AS one\n# no step\nRUN x \\\n  && y\nFROM one\nENV A=1 B="2 3"\n'
        'CMD ["p", "-m"]\n'
    )
    one, two = dockerfile.read(file, {"P": "3.13"})
    assert (one.base, one.name, one.steps) == (
        "a:3.13",
        "one",
        [dockerfile.Instruction("RUN", "x    && y")],
    )
    assert two.steps[0].pairs() == {"A": "1", "B": "2 3"}
    assert two.steps[1].words() == ["p", "-m"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shell_scripts_are_valid(script: Path) -> None:
    subprocess.run(["sh", "-n", str(script)], check=True)
    assert os.access(script, os.X_OK)
    assert re.search(r"^set -eu", script.read_text(), re.MULTILINE)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", str(script)], check=True)


@pytest.mark.parametrize(
    ("arguments", "started"),
    [
        ([], "-m spotfit.agent"),
        (["--check"], "-m spotfit.agent --check"),
        (["python", "-c", "1"], "-c 1"),
    ],
)
def test_entry_point_starts_the_agent_or_the_command_of_the_cloud(
    arguments: list[str], started: str, tmp_path: Path
) -> None:
    write_fake_program(tmp_path / "python", 'echo "$$ $*"')
    with subprocess.Popen(
        [str(IMAGE / "entrypoint.sh"), *arguments],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        output, _ = process.communicate(timeout=20)
        assert output.strip() == f"{process.pid} {started}", (
            "the same process, so that signals reach it"
        )


def test_image_is_tagged_and_labelled_with_its_versions(tmp_path: Path) -> None:
    write_fake_program(tmp_path / "docker", f'printf "%s\\n" "$@" > {tmp_path}/arguments')
    done = subprocess.run(
        [str(IMAGE / "bake.sh"), "cpu", "registry:5000/spotfit", "--push"],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "PYTHON": "3.12"},
        capture_output=True,
        text=True,
        check=True,
    )
    version, torch = pyproject_version(), pins.read("cpu")["torch"]
    name = f"registry:5000/spotfit:{version}-py3.12-torch{torch}-cpu"
    assert done.stdout.strip() == name
    arguments = (tmp_path / "arguments").read_text().splitlines()
    assert {"PYTHON=3.12", name, "--push", "dev.spotfit.python=3.12"} <= set(arguments)
    (packages,) = [
        argument for argument in arguments if argument.startswith("dev.spotfit.packages=")
    ]
    assert f"torch=={torch}" in packages


@pytest.mark.parametrize("platform", ["linux/amd64", "linux/arm64"])
def test_image_is_built_for_the_platform_of_the_machines(tmp_path: Path, platform: str) -> None:
    """Docker's default is the platform of this computer, which may be a laptop with ARM."""
    write_fake_program(tmp_path / "docker", f'printf "%s\\n" "$@" > {tmp_path}/arguments')
    chosen = {} if platform == "linux/amd64" else {"PLATFORM": platform}
    done = subprocess.run(
        [str(IMAGE / "bake.sh"), "cuda", "r/spotfit"],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "PYTHON": "3.12", "BUILD": "2", **chosen},
        capture_output=True,
        text=True,
        check=True,
    )
    arguments = (tmp_path / "arguments").read_text().splitlines()
    assert arguments[arguments.index("--platform") + 1] == platform
    assert f"dev.spotfit.platform={platform}" in arguments
    assert done.stdout.strip().endswith("-cuda-b2"), "an immutable tag cannot be pushed twice"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["cpu"], "needs two arguments, not 1"),
        (["tpu", "spotfit"], "does not exist"),
        (["cpu", "spotfit"], "None of no-such-python is Python 3.11"),
    ],
)
def test_vm_bootstrap_states_why_it_fails(arguments: list[str], error: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [str(IMAGE / "vm_bootstrap.sh"), *arguments],
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "SPOTFIT_PYTHON": "no-such-python"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 64
    assert error in done.stderr
    assert "What to do" in done.stderr


FAKE_DOCKER = """
case $1 in
run) shift
    case $1 in
    --rm) shift 2; exec "$@" ;;
    --name) name=$2; shift 3
        "$@" > "$HERE/$name.log" & echo $! > "$HERE/$name.pid"
        wait "$(cat "$HERE/$name.pid")" ;;
    esac ;;
logs) cat "$HERE/$2.log" ;;
stop) kill "$(cat "$HERE/$4.pid")" ;;
esac
"""
"""The docker commands that smoke.sh calls; the image is `python` on the path."""
FAKE_PYTHON = """
case "$*" in
*--check) echo '{REPORT}' ;;
*spotfit.agent) exit {REFUSED} ;;
*) exec {PYTHON} "$@" ;;
esac
"""


@pytest.mark.parametrize(
    ("report", "exit_code", "output"),
    [
        ('{"user":10001,"problems":[]}', 64, "passed"),
        ('{"user":0,"problems":[]}', 64, "runs as root"),
        ('{"user":10001,"problems":[]}', 0, "exited with 0 instead of 64"),
    ],
)
def test_smoke_test_checks_user_and_exit_code(
    report: str, exit_code: int, output: str, tmp_path: Path
) -> None:
    write_fake_program(tmp_path / "docker", FAKE_DOCKER)
    replacements = {"REPORT": report, "REFUSED": str(exit_code), "PYTHON": sys.executable}
    python = FAKE_PYTHON
    for name, replacement in replacements.items():
        python = python.replace("{" + name + "}", replacement)
    write_fake_program(tmp_path / "python", python)
    done = subprocess.run(
        [str(IMAGE / "smoke.sh"), "registry/spotfit:1"],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "HERE": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert output in done.stdout + done.stderr
    assert (done.returncode == 0) == (output == "passed")


def pyproject_version() -> str:
    found = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def write_fake_program(program: Path, script: str) -> None:
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
