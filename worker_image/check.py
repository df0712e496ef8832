"""Execute the steps of a Dockerfile on this machine, without Docker, and test the result.

`python -m worker_image.check cpu` reads the steps from Dockerfile.cpu. Each stage is a
copy-on-write layer over the file system of this machine, which replaces the base image. Nothing
outside the layers changes, and the checkout is hidden in them. Needs Linux, root
(`unshare --mount`, overlayfs) and a package index; takes a few minutes. An environment variable
overrides the default of the ARG of the same name (`TORCH_INDEX=`).

Then the image is used as clouds do: by its entry point, by a command of the cloud, with signals, as
its user. Finally `vm_bootstrap.sh` runs twice as a user without root.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from worker_image import dockerfile, pins

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
AGENT = ("python", "-m", "spotfit.agent")
EXIT_UNUSABLE, EXIT_DRAINED = 64, 85
EXIT_CANNOT_MOUNT = 77
"""Exit code if layers cannot be mounted on this machine."""

_BASE_PYTHON = "/opt/base-image/bin"
_BASE_PATH = f"{_BASE_PYTHON}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_INHERITED_VARIABLES = ("PIP_", "SSL_", "REQUESTS_", "http_proxy", "https_proxy", "no_proxy")
_WAITS_FOR_SIGNAL = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(85))
print("up", flush=True)
time.sleep(60)
"""
_INSIDE = "--inside"
_TIMEOUT_S = 1200


def main() -> None:
    parser = argparse.ArgumentParser(description="Check an image without building it.")
    parser.add_argument("kind", choices=["cpu", "cuda"])
    parser.add_argument(_INSIDE, action="store_true", help=argparse.SUPPRESS)
    values = parser.parse_args()
    if values.inside:
        with tempfile.TemporaryDirectory(prefix="spotfit-image-") as folder, _layers(folder):
            check(values.kind, Path(folder))
    elif os.getuid() != 0 or not shutil.which("unshare"):
        print("This check needs root and unshare(1), because it mounts file systems.")
        sys.exit(EXIT_CANNOT_MOUNT)
    else:
        unshare = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
        command = (sys.executable, "-m", "worker_image.check", values.kind, _INSIDE)
        os.chdir(ROOT)
        os.execvp(unshare[0], [*unshare, *command])  # noqa: S606 - the end of this process ends all children


def check(kind: str, folder: Path) -> None:
    """Build the image in `folder` and check its guarantees by assertions."""
    stages = dockerfile.read(HERE / f"Dockerfile.{kind}", {"PYTHON": PYTHON})
    built: dict[str, Layer] = {}
    for stage in stages:
        layer = built[stage.name] = Layer.over_this_machine(folder / stage.name, stage.base)
        for step in stage.steps:
            layer.execute(step, built)
    check_image(built[stages[-1].name], kind)
    check_bootstrap(Layer.over_this_machine(folder / "bare", stages[-1].base), kind)
    print(f"{kind}: all checks passed.")


def check_image(image: "Layer", kind: str) -> None:
    """Check the guarantees of the image."""
    output = image.run(*image.entrypoint, *image.command, expect=EXIT_UNUSABLE)
    assert "agent.refused" in output, "without a run the agent logs an error"
    report = _report(image.run(*image.entrypoint, "--check"))
    assert report["user"] != 0, "the agent must not be root"
    assert report["python"].startswith(f"{PYTHON}."), report["python"]
    _check_versions(report["packages"], kind)
    bare = _report(image.run(*AGENT, "--check"))
    assert bare["user"] == report["user"], "a command of the cloud works without the entry point"
    assert (
        image.exit_code_after_sigterm(*image.entrypoint, "python", "-c", _WAITS_FOR_SIGNAL)
        == EXIT_DRAINED
    ), "signals must reach the command"
    hello = ROOT / "examples" / "01_hello_two_nodes.py"
    shutil.copy(hello, image.merged / "tmp" / hello.name)
    assert "sum of all ranks: 6.0" in image.run("python", f"/tmp/{hello.name}")  # noqa: S108


def check_bootstrap(machine: "Layer", kind: str) -> None:
    """Run `vm_bootstrap.sh` without root on a machine that has only Python."""
    for name in ("vm_bootstrap.sh", "constraints"):
        machine.copy(HERE / name, machine.merged / "opt" / "bootstrap" / name)
    wheel = _wheel(machine.folder)
    machine.copy(wheel, machine.merged / "opt" / "bootstrap" / wheel.name)
    machine.shell("useradd --uid 10002 --home-dir /srv/other --create-home other")
    machine.user, machine.environment["HOME"] = "10002:10002", "/srv/other"
    if "TORCH_INDEX" in os.environ:
        machine.environment["SPOTFIT_TORCH"] = os.environ["TORCH_INDEX"]
    words = ("sh", "/opt/bootstrap/vm_bootstrap.sh", kind, f"/opt/bootstrap/{wheel.name}")
    output = machine.run(*words, "--check")
    _check_versions(_report(output)["packages"], kind)
    again = machine.run(*words, "--check")
    assert "Installing" in output, output
    assert "Installing" not in again, "an existing installation must be reused"


def _wheel(folder: Path) -> Path:
    words = ("-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder / "wheel"))
    subprocess.run([sys.executable, *words, str(ROOT)], check=True)
    return next((folder / "wheel").glob("spotfit-*.whl"))


def _report(output: str) -> dict[str, Any]:
    """Return the report of `--check` in the output."""
    (line,) = [line for line in output.splitlines() if line.startswith("{")]
    report: dict[str, Any] = json.loads(line)
    assert not report["problems"], report["problems"]
    return report


def _check_versions(packages: Mapping[str, str], kind: str) -> None:
    ours = {name: version.partition("+")[0] for name, version in packages.items()}
    pinned = pins.read(kind)
    wrong = {name: ours.get(name) for name in pinned if ours.get(name) != pinned[name]}
    assert not wrong, f"versions differ from the pins: {wrong}"
    assert set(ours) - set(pinned) <= {"pip", "spotfit"}, set(ours) - set(pinned)


@dataclass
class Layer:
    """A copy-on-write file system over that of this machine."""

    folder: Path
    environment: dict[str, str] = field(default_factory=lambda: {"PATH": _BASE_PATH, "HOME": "/"})
    arguments: dict[str, str] = field(default_factory=dict)
    """Build arguments, set only in build steps."""
    user: str = "0:0"
    workdir: str = "/"
    entrypoint: Sequence[str] = ()
    command: Sequence[str] = ()

    @property
    def merged(self) -> Path:
        """The mount point of the layer."""
        return self.folder / "merged"

    @classmethod
    def over_this_machine(cls, folder: Path, base: str) -> "Layer":
        """Mount an empty layer; this machine, with its Python first on PATH, replaces `base`."""
        assert base.startswith(f"python:{PYTHON}-"), f"this Python cannot replace {base}"
        layer = cls(folder)
        for name in ("upper", "work", "merged", "tmp"):
            (folder / name).mkdir(parents=True)
        where = f"lowerdir=/,upperdir={folder / 'upper'},workdir={folder / 'work'}"
        _mount("-t", "overlay", "overlay", "-o", where, str(layer.merged))
        for bound in ("/proc", "/dev"):
            _mount("--rbind", bound, f"{layer.merged}{bound}")
        (folder / "tmp").chmod(0o1777)
        _mount("--bind", str(folder / "tmp"), str(layer.merged / "tmp"))
        checkout = layer.merged / ROOT.relative_to("/")
        if checkout.is_dir():  # only COPY may read the checkout
            _mount("-t", "tmpfs", "tmpfs", str(checkout))
        layer.environment["HOME"] = os.environ.get("HOME", "/")
        layer._link_python()
        return layer

    def execute(self, step: dockerfile.Instruction, built: Mapping[str, "Layer"]) -> None:
        """Execute a step of the Dockerfile."""
        print(f"[{self.folder.name}] {step.word} {step.rest}", flush=True)
        known = {**self.arguments, **self.environment}
        match step.word:
            case "ARG":
                values = {name: os.environ.get(name, text) for name, text in step.pairs().items()}
                self.arguments |= values
            case "ENV":
                values = {n: dockerfile.substitute(text, known) for n, text in step.pairs().items()}
                self.environment |= values
            case "WORKDIR":
                self.workdir = step.rest
                self._make_dir(self.merged / self.workdir.lstrip("/"))
            case "COPY":
                self._copy_step(step.words(), built)
            case "RUN":
                self.shell(step.rest)
            case "USER":
                self.user = step.rest
            case "ENTRYPOINT":
                self.entrypoint = step.words()
            case "CMD":
                self.command = step.words()

    def shell(self, line: str) -> None:
        """Execute a RUN step, with build arguments and the index settings of this machine."""
        inherited = {n: t for n, t in os.environ.items() if n.startswith(_INHERITED_VARIABLES)}
        words = self._words("/bin/sh", "-c", line, also={**inherited, **self.arguments})
        subprocess.run(words, check=True)

    def run(self, *words: str, expect: int = 0) -> str:
        """Run a command of the image and return its output; the exit code must be `expect`."""
        print(f"[{self.folder.name}] $ {' '.join(words)}", flush=True)
        inherited = {n: t for n, t in os.environ.items() if n.startswith(_INHERITED_VARIABLES)}
        done = subprocess.run(
            self._words(*words, also=inherited),
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
            timeout=_TIMEOUT_S,
        )
        assert done.returncode == expect, f"{words}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def exit_code_after_sigterm(self, *words: str) -> int:
        """Send SIGTERM to a command after its first output, and return its exit code."""
        with subprocess.Popen(self._words(*words), stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            process.stdout.readline()
            process.terminate()
            return process.wait(timeout=30)

    def copy(self, source: Path, target: Path, *, mode: int | None = None) -> None:
        """Copy a file, or the content of a directory."""
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            leave = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, target, dirs_exist_ok=True, ignore=leave)
        else:
            shutil.copy(source, target)
        if mode is not None:
            target.chmod(mode)

    def _copy_step(self, words: list[str], built: Mapping[str, "Layer"]) -> None:
        options = dict(word[2:].split("=") for word in words if word.startswith("--"))
        *sources, target = [word for word in words if not word.startswith("--")]
        source_root = built[options["from"]].merged if "from" in options else ROOT
        destination = self.merged / os.path.join(self.workdir, target).lstrip("/")  # noqa: PTH118
        mode = int(options["chmod"], 8) if "chmod" in options else None
        for source in sources:
            found = source_root / source.lstrip("/")
            into = target.endswith("/") and found.is_file()
            self.copy(found, destination / found.name if into else destination, mode=mode)

    def _words(self, *words: str, also: Mapping[str, str] | None = None) -> list[str]:
        known = {**(also or {}), **self.environment}
        values = [f"{name}={text}" for name, text in known.items()]
        inside = f'cd {self.workdir} && exec "$@"'
        chroot = ("chroot", f"--userspec={self.user}", str(self.merged))
        return [*chroot, "/usr/bin/env", "-i", *values, "/bin/sh", "-c", inside, "sh", *words]

    def _make_dir(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        os.chown(folder, *map(int, self.user.split(":")))

    def _link_python(self) -> None:
        """Make the interpreter of this check accessible to all users of the layer."""
        real = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
        for above in real.parents:
            inside = self.merged / above.relative_to("/")
            if not os.access(inside, os.X_OK) or inside.stat().st_mode & 0o005 != 0o005:
                inside.chmod(inside.stat().st_mode | 0o005)
        for name in ("python", "python3", f"python{PYTHON}"):
            link = self.merged / _BASE_PYTHON.lstrip("/") / name
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(real)


@contextmanager
def _layers(folder: str) -> Iterator[None]:
    """Unmount everything below `folder` before it is removed."""
    try:
        yield
    finally:
        mounted = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        for where in reversed([one for one in mounted if one.startswith(folder)]):
            subprocess.run(["umount", "--lazy", where], check=False)


def _mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True)


if __name__ == "__main__":
    main()
