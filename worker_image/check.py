"""Take the steps of a Dockerfile on this machine, without Docker, and boot the agent they make.

`python -m worker_image.check cpu` reads the steps from Dockerfile.cpu itself: what is checked is
what is built. Each stage is a copy-on-write layer over this machine's own file system, which stands
for the base image of the same Python; nothing outside the layers changes, and the checkout is
hidden in them.
Needs Linux and root (`unshare --mount`, overlayfs), and a package index; takes a few minutes. A
variable of the environment that a step knows as ARG (`TORCH_INDEX=`) counts more than its default.

Then the image is used as clouds use it: by its entry point, by a command of the cloud's own, with
signals, as the user it names. `vm_bootstrap.sh` makes a bare machine of it last, twice.
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
REFUSED, SIGNALLED = 64, 85
NO_ROOM = 77
"""Our exit code where this machine does not let us build layers."""

_BASE_PYTHON = "/opt/base-image/bin"
_BASE_PATH = f"{_BASE_PYTHON}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_HANDED_IN = ("PIP_", "SSL_", "REQUESTS_", "http_proxy", "https_proxy", "no_proxy")
_WAITS_FOR_SIGNAL = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(85))
print("up", flush=True)
time.sleep(60)
"""
_INSIDE = "--inside"
_PATIENCE_S = 1200


def main() -> None:
    asked = argparse.ArgumentParser(description="Check an image without building it.")
    asked.add_argument("kind", choices=["cpu", "cuda"])
    asked.add_argument(_INSIDE, action="store_true", help=argparse.SUPPRESS)
    values = asked.parse_args()
    if values.inside:
        with tempfile.TemporaryDirectory(prefix="spotfit-image-") as folder, _layers(folder):
            check(values.kind, Path(folder))
    elif os.getuid() != 0 or not shutil.which("unshare"):
        print("This check needs root and unshare(1): it mounts layers of its own.")
        sys.exit(NO_ROOM)
    else:
        alone = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
        again = (sys.executable, "-m", "worker_image.check", values.kind, _INSIDE)
        os.chdir(ROOT)
        os.execvp(alone[0], [*alone, *again])  # noqa: S606 - ending this process ends all children


def check(kind: str, folder: Path) -> None:
    """Build in `folder`, then boot what was built. Raises where a promise is not kept."""
    stages = dockerfile.read(HERE / f"Dockerfile.{kind}", {"PYTHON": PYTHON})
    built: dict[str, Layer] = {}
    for stage in stages:
        layer = built[stage.name] = Layer.over_this_machine(folder / stage.name, stage.base)
        for step in stage.steps:
            layer.take(step, built)
    boots(built[stages[-1].name], kind)
    bare_machine(Layer.over_this_machine(folder / "bare", stages[-1].base), kind)
    print(f"{kind}: the image keeps its promises.")


def boots(image: "Layer", kind: str) -> None:
    """The image's promises, one by one."""
    output = image.run(*image.entrypoint, *image.command, expect=REFUSED)
    assert "The agent cannot start" in output, "with no run to serve, the agent says so"
    report = _report(image.run(*image.entrypoint, "--check"))
    assert report["user"] != 0, "the agent is not root"
    assert report["python"].startswith(f"{PYTHON}."), report["python"]
    _as_pinned(report["packages"], kind)
    bare = _report(image.run(*AGENT, "--check"))
    assert bare["user"] == report["user"], "a cloud's own command needs no entry point"
    assert image.signalled(*image.entrypoint, "python", "-c", _WAITS_FOR_SIGNAL) == SIGNALLED, (
        "signals pass"
    )
    hello = ROOT / "examples" / "01_hello_two_nodes.py"
    shutil.copy(hello, image.merged / "tmp" / hello.name)
    assert "all ranks add up to 6.0" in image.run("python", f"/tmp/{hello.name}")  # noqa: S108


def bare_machine(machine: "Layer", kind: str) -> None:
    """`vm_bootstrap.sh` by a user who is not root, with nothing but Python there."""
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
    _as_pinned(_report(output)["packages"], kind)
    again = machine.run(*words, "--check")
    assert "Installing" in output, output
    assert "Installing" not in again, "what is there is not installed again"


def _wheel(folder: Path) -> Path:
    words = ("-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder / "wheel"))
    subprocess.run([sys.executable, *words, str(ROOT)], check=True)
    return next((folder / "wheel").glob("spotfit-*.whl"))


def _report(output: str) -> dict[str, Any]:
    """What `--check` found, among whatever else was printed."""
    (line,) = [line for line in output.splitlines() if line.startswith("{")]
    report: dict[str, Any] = json.loads(line)
    assert not report["complaints"], report["complaints"]
    return report


def _as_pinned(packages: Mapping[str, str], kind: str) -> None:
    ours = {name: version.partition("+")[0] for name, version in packages.items()}
    pinned = pins.read(kind)
    wrong = {name: ours.get(name) for name in pinned if ours.get(name) != pinned[name]}
    assert not wrong, f"not as pinned: {wrong}"
    assert set(ours) - set(pinned) <= {"pip", "spotfit"}, set(ours) - set(pinned)


@dataclass
class Layer:
    """A file system in the making, over that of this machine."""

    folder: Path
    environment: dict[str, str] = field(default_factory=lambda: {"PATH": _BASE_PATH, "HOME": "/"})
    arguments: dict[str, str] = field(default_factory=dict)
    """Known only to the build steps."""
    user: str = "0:0"
    place: str = "/"
    entrypoint: Sequence[str] = ()
    command: Sequence[str] = ()

    @property
    def merged(self) -> Path:
        """Its root, seen from outside."""
        return self.folder / "merged"

    @classmethod
    def over_this_machine(cls, folder: Path, base: str) -> "Layer":
        """Empty, over what stands for `base`: this machine with that Python first on its path."""
        assert base.startswith(f"python:{PYTHON}-"), f"no Python of ours stands for {base}"
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
        if checkout.is_dir():  # nothing may come from there but by COPY
            _mount("-t", "tmpfs", "tmpfs", str(checkout))
        layer.environment["HOME"] = os.environ.get("HOME", "/")
        layer._bring_python()
        return layer

    def take(self, step: dockerfile.Step, built: Mapping[str, "Layer"]) -> None:
        """Do as the step says."""
        print(f"[{self.folder.name}] {step.word} {step.rest}", flush=True)
        known = {**self.arguments, **self.environment}
        match step.word:
            case "ARG":
                values = {name: os.environ.get(name, text) for name, text in step.pairs().items()}
                self.arguments |= values
            case "ENV":
                values = {n: dockerfile.filled(text, known) for n, text in step.pairs().items()}
                self.environment |= values
            case "WORKDIR":
                self.place = step.rest
                self._own(self.merged / self.place.lstrip("/"))
            case "COPY":
                self._copied(step.words(), built)
            case "RUN":
                self.shell(step.rest)
            case "USER":
                self.user = step.rest
            case "ENTRYPOINT":
                self.entrypoint = step.words()
            case "CMD":
                self.command = step.words()

    def shell(self, line: str) -> None:
        """A step that builds: it knows the arguments, and how this machine reaches its index."""
        handed_in = {n: t for n, t in os.environ.items() if n.startswith(_HANDED_IN)}
        words = self._words("/bin/sh", "-c", line, also={**handed_in, **self.arguments})
        subprocess.run(words, check=True)

    def run(self, *words: str, expect: int = 0) -> str:
        """All that a command of the finished image prints. Raises where it ends otherwise."""
        print(f"[{self.folder.name}] $ {' '.join(words)}", flush=True)
        handed_in = {n: t for n, t in os.environ.items() if n.startswith(_HANDED_IN)}
        done = subprocess.run(
            self._words(*words, also=handed_in),
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
            timeout=_PATIENCE_S,
        )
        assert done.returncode == expect, f"{words}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def signalled(self, *words: str) -> int:
        """The exit code of a command that is sent SIGTERM after its first output."""
        with subprocess.Popen(self._words(*words), stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            process.stdout.readline()
            process.terminate()
            return process.wait(timeout=30)

    def copy(self, source: Path, target: Path, *, mode: int | None = None) -> None:
        """A file, or what is in a directory, readable by all users."""
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            leave = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, target, dirs_exist_ok=True, ignore=leave)
        else:
            shutil.copy(source, target)
        if mode is not None:
            target.chmod(mode)

    def _copied(self, words: list[str], built: Mapping[str, "Layer"]) -> None:
        options = dict(word[2:].split("=") for word in words if word.startswith("--"))
        *sources, target = [word for word in words if not word.startswith("--")]
        whence = built[options["from"]].merged if "from" in options else ROOT
        goal = self.merged / os.path.join(self.place, target).lstrip("/")  # noqa: PTH118
        mode = int(options["chmod"], 8) if "chmod" in options else None
        for source in sources:
            found = whence / source.lstrip("/")
            into = target.endswith("/") and found.is_file()
            self.copy(found, goal / found.name if into else goal, mode=mode)

    def _words(self, *words: str, also: Mapping[str, str] | None = None) -> list[str]:
        known = {**(also or {}), **self.environment}
        values = [f"{name}={text}" for name, text in known.items()]
        inside = f'cd {self.place} && exec "$@"'
        jail = ("chroot", f"--userspec={self.user}", str(self.merged))
        return [*jail, "/usr/bin/env", "-i", *values, "/bin/sh", "-c", inside, "sh", *words]

    def _own(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        os.chown(folder, *map(int, self.user.split(":")))

    def _bring_python(self) -> None:
        """The interpreter that runs this check, reachable for all users."""
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
    """What is mounted below `folder` is gone before the folder is."""
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
