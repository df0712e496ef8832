"""Rules for every test: loopback only, an empty home directory, a reported seed, no real waiting.

The guards see Python code of this process only. Child processes and compiled drivers get
loopback addresses and no credentials.
"""

import ipaddress
import os
import random
import re
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("anywhere", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("anywhere")  # a busy machine is not a failure

DEFAULT_SEED = 20_260_101
VIRTUAL_TIME_ONLY = ("unit", "sim")
GUARDED_MODULES = ("spotfit", "tests", "tenacity")
TESTS = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, help="the seed of every random generator")


DRAWN_SEED = pytest.StashKey[int]()
"""A seed drawn for this session, for tests that cover new cases in each run."""


def pytest_configure(config: pytest.Config) -> None:
    is_configured = config.getoption("--seed") is not None or "SPOTFIT_SEED" in os.environ
    # Every process of `pytest -n` collects the same tests, of which some have a drawn seed.
    received = getattr(config, "workerinput", {}).get("drawn_seed")
    if received is not None:
        config.stash[DRAWN_SEED] = int(received)
    elif is_configured:
        config.stash[DRAWN_SEED] = _seed(config)
    else:
        config.stash[DRAWN_SEED] = random.SystemRandom().randrange(10**9)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Send the drawn seed to a process of `pytest -n`."""
    node.workerinput["drawn_seed"] = node.config.stash[DRAWN_SEED]


def pytest_report_header(config: pytest.Config) -> str:
    drawn = config.stash[DRAWN_SEED]
    return f"seed: {_seed(config)}, drawn: {drawn} (repeat with --seed or SPOTFIT_SEED)"


def _seed(config: pytest.Config) -> int:
    chosen = config.getoption("--seed")
    return int(os.environ.get("SPOTFIT_SEED", DEFAULT_SEED)) if chosen is None else int(chosen)


@pytest.fixture(scope="session")
def seed(request: pytest.FixtureRequest) -> int:
    """The seed in the header; derive every random stream of a test from it."""
    return _seed(request.config)


@pytest.fixture
def rng(seed: int, request: pytest.FixtureRequest) -> random.Random:
    """A random generator whose values do not depend on the tests that ran before."""
    return random.Random(f"{seed} {request.node.nodeid}")


# ── an empty home directory ───────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="session", autouse=True)
def _clean_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests see neither the home directory nor the credentials of the user who runs them."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith(("AWS_", "AZURE_", "GOOGLE_", "SPOTFIT_", "XDG_")):
                patch.delenv(name)
        patch.setenv("HOME", str(home))
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        yield


# ── loopback only ─────────────────────────────────────────────────────────────────────────────────


class NetworkAccessError(AssertionError):
    """A test opened a connection beyond loopback."""


@pytest.fixture(scope="session", autouse=True)
def _loopback_only() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("connect", "connect_ex", "sendto"):
            patch.setattr(socket.socket, name, _guard_connect(getattr(socket.socket, name)))
        patch.setattr(socket, "getaddrinfo", _guard_lookup(socket.getaddrinfo))
        yield


def _guard_connect(call: Any) -> Any:
    def guarded(self: socket.socket, *args: Any) -> Any:
        if self.family in (socket.AF_INET, socket.AF_INET6):
            _check_loopback(args[-1][0])
        return call(self, *args)

    return guarded


def _guard_lookup(call: Any) -> Any:
    def guarded(host: Any, *args: Any, **kwargs: Any) -> Any:
        _check_loopback(host)
        return call(host, *args, **kwargs)

    return guarded


def _check_loopback(host: str | bytes | None) -> None:
    name = host.decode() if isinstance(host, bytes) else host
    if not _is_loopback(name):
        raise NetworkAccessError(f"tests connect to loopback only, not to {name}")


def _is_loopback(name: str | None) -> bool:
    if name in (None, "", "localhost", "0.0.0.0", "::", socket.gethostname()):  # noqa: S104  # compared, not bound
        return True
    assert name is not None
    try:
        return ipaddress.ip_address(name.partition("%")[0]).is_loopback
    except ValueError:
        return name.endswith(".localhost")


# ── no real waiting where time is virtual ─────────────────────────────────────────────────────────


class RealWaitError(AssertionError):
    """A test of virtual time waited for a real clock."""


@pytest.fixture(autouse=True)
def _no_real_sleep(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """In unit/ and sim/ neither our code nor a test may sleep, unless marked `real_time(reason)`.

    Libraries may: `Popen.wait(timeout)` sleeps while it polls.
    """
    folder = request.path.relative_to(TESTS).parts[0]
    if folder in VIRTUAL_TIME_ONLY and request.node.get_closest_marker("real_time") is None:
        monkeypatch.setattr(time, "sleep", _forbid_own_sleep(time.sleep))


def _forbid_own_sleep(sleep: Any) -> Any:
    def guarded(seconds: float) -> None:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if seconds > 0 and caller.startswith(GUARDED_MODULES):
            raise RealWaitError(f"{caller} slept {seconds} s; use a virtual clock")
        sleep(seconds)

    return guarded


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for marker in item.iter_markers("real_time"):
            if not (marker.args or marker.kwargs.get("reason")):
                raise pytest.UsageError(f"{item.nodeid}: real_time needs a reason")


# ── what was skipped, and what installs it ────────────────────────────────────────────────────────


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """End with the missing programs and packages, the most skipped tests first."""
    counts = Counter(
        reason
        for report in terminalreporter.stats.get("skipped", [])
        if (reason := _missing_installation(report))
    )
    if counts:
        terminalreporter.section("not installed, therefore skipped")
        for reason, count in counts.most_common():
            terminalreporter.line(f"{count:5}  {reason}")


def _missing_installation(report: pytest.TestReport | pytest.CollectReport) -> str | None:
    """Return the skip reason, which ends with the command, if something is not installed."""
    if not isinstance(report.longrepr, tuple):
        return None
    reason = report.longrepr[2].removeprefix("Skipped: ")
    missing = _NOT_IMPORTED.match(reason)
    if missing is not None:
        return f"{missing[1]} is not installed; `{_installing_command(missing[1])}`"
    return reason if "not installed" in reason else None


def _installing_command(module: str) -> str:
    """Return the command that installs a module, which has an environment of its own or not."""
    requirement = re.compile(rf"(py)?{module.replace('_', '[-_]')}(?![\w-])")
    for path in sorted((TESTS.parent / ".ci").glob("*.txt")):
        if any(map(requirement.match, path.read_text().splitlines())):
            return f"make {path.stem}"
    return "pip install -c constraints.txt -e '.[torch,test]'"


_NOT_IMPORTED = re.compile(r"could not import '([^'.]+)")
