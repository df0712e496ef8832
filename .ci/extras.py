"""Resolve every extra and every pair of extras with uv, and the light ones with pip 23.2.1.

Nothing is installed. `make extras` runs this in .bench/venv-extras; ONLY="s3 aws" restricts it to
the pairs that contain one of these extras. A pair that does not resolve fails the run.
"""

import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable, Sequence
from itertools import combinations
from pathlib import Path

ROOT = Path(__file__).parents[1]
WORK = ROOT / ".bench" / "extras"
HEAVY = {"torch", "torchft", "jax", "onnx", "tensorflow", "demo", "skypilot", "test", "dev"}
"""uv reads metadata. pip downloads whole wheels where an index serves no metadata: gigabytes of
torch, minutes of the others."""
LIMIT_S = 600.0
"""Of one resolution. On two idle cores pip takes 10 to 60 s."""


def main() -> None:
    only = set(sys.argv[1:])
    extras = list(
        tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    )
    if unknown := only - set(extras):
        sys.exit(f"There is no extra {', '.join(sorted(unknown))}. Extras: {', '.join(extras)}.")
    WORK.mkdir(parents=True, exist_ok=True)
    (WORK / "constraints.txt").write_text(torch_pin())
    wanted = [(name,) for name in extras] + list(combinations(extras, 2))
    wanted = [names for names in wanted if not only or only & set(names)]
    failed = check_uv(wanted, extras) + check_pip(
        names for names in wanted if not HEAVY & set(names)
    )
    print(f"{len(wanted)} combinations, {len(failed)} failed.")
    for line in failed:
        print(line)
    sys.exit(bool(failed))


def torch_pin() -> str:
    """Return the pin of torch: any other version may be a build with CUDA, of gigabytes."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return "".join(f"{line}\n" for line in lines if line.startswith("torch=="))


def check_uv(wanted: list[tuple[str, ...]], extras: list[str]) -> list[str]:
    """Resolve each combination; print what a pair holds back. Returns a line per failure."""
    alone: dict[str, dict[str, str]] = {}
    failed = []
    for names in wanted:
        flags = [flag for name in names for flag in ("--extra", name)]
        uv = [Path(sys.prefix) / "bin" / "uv", "pip", "compile", "--no-annotate", "--no-header"]
        options = ["--python-version", "3.11", "--constraint", WORK / "constraints.txt", *flags]
        done, took_s = call([*uv, *options, ROOT / "pyproject.toml"])
        if done.returncode:
            failed.append(f"uv: {','.join(names)}: {done.stderr.strip()}")
            continue
        pins = dict(re.findall(r"^([\w.-]+)==(\S+)", done.stdout, re.MULTILINE))
        if len(names) == 1:
            alone[names[0]] = pins
        print(f"uv  {took_s:4.0f} s  {','.join(names)}{held_back(pins, names, alone)}", flush=True)
    return failed


def held_back(
    pins: dict[str, str], names: tuple[str, ...], alone: dict[str, dict[str, str]]
) -> str:
    """Say which packages are older in this pair than with one of its extras alone."""
    older = {
        f"{package} {pins[package]} instead of {version}"
        for name in names
        for package, version in alone.get(name, {}).items()
        if package in pins and release(pins[package]) < release(version)
    }
    return "".join(f"\n            {line}" for line in sorted(older))


def release(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


def check_pip(wanted: Iterable[tuple[str, ...]]) -> list[str]:
    """Resolve each combination with the pip of this environment. Returns a line per failure."""
    pip = [sys.executable, "-m", "pip"]
    for old in WORK.glob("*.whl"):
        old.unlink()
    build = [*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", WORK, ROOT]
    subprocess.run(build, check=True)  # noqa: S603 - the pip of this environment
    [wheel] = WORK.glob("*.whl")
    failed = []
    for names in wanted:
        dry_run = ["install", "--dry-run", "--ignore-installed", "--quiet", "--report"]
        asked = f"{wheel}[{','.join(names)}]"
        done, took_s = call([*pip, *dry_run, WORK / "report.json", asked])
        print(f"pip {took_s:4.0f} s  {','.join(names)}", flush=True)
        if done.returncode:
            failed.append(f"pip: {','.join(names)}: {done.stderr.strip()[-1000:]}")
    return failed


def call(command: Sequence[str | Path]) -> tuple[subprocess.CompletedProcess[str], float]:
    began = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)  # noqa: S603 - uv or pip
    except subprocess.TimeoutExpired:
        done = subprocess.CompletedProcess(command, 1, "", f"took longer than {LIMIT_S:.0f} s")
    return done, time.monotonic() - began


if __name__ == "__main__":
    main()
