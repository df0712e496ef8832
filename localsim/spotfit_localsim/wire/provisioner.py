"""`sim://<cloud>`: the real provisioner of a cloud, and its real client, against a simulator."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import http.client
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from spotfit.core.codec import encode
from spotfit.core.errors import ConfigError, ProvisionError
from spotfit.host import env
from spotfit.host.clocks import SystemClock
from spotfit.model.group import GroupHandle, GroupPlan, GroupRequest, GroupStatus
from spotfit.provision.api import Provisioner, Refusal, Traits
from spotfit.provision.checkup import Finding, look
from spotfit.provision.launch import Launch
from spotfit.provision.options import parse_options
from spotfit.provision.output import Said, said
from spotfit.provision.registry import open_provisioner
from spotfit_localsim.live.processes import start_detached
from spotfit_localsim.wire.options import SimOptions
from spotfit_localsim.wire.simulator import OURS, load_cloud
from spotfit_localsim.wire.site import ROOT, digest, write

_MODULE = "spotfit_localsim.wire.simulator"
_UP_WITHIN_S = 20.0
_LOOK_EVERY_S = 0.02


class SimProvisioner:
    """Delegates its verbs to the cloud's own provisioner, and keeps a simulator up to answer it."""

    name = "sim"

    def __init__(self, options: SimOptions, of_the_cloud: dict[str, Any] | None = None) -> None:
        """`of_the_cloud`: options of the simulated cloud itself."""
        self.options = options
        self._of_the_cloud = of_the_cloud or {}
        self.root = _root_of(options)
        self._opened: tuple[str, Provisioner] | None = None

    @classmethod
    def with_options(cls, **options: Any) -> SimProvisioner:
        """From the fields of `SimOptions`; what is none of them is the cloud's."""
        own = {field.name for field in dataclasses.fields(SimOptions)}
        mine = {name: value for name, value in options.items() if name in own}
        rest = {name: value for name, value in options.items() if name not in own}
        return cls(parse_options(SimOptions, mine), rest)

    @property
    def traits(self) -> Traits:
        """Those of the cloud, at the pace of a simulator."""
        return dataclasses.replace(
            self._real.traits,
            observe_s=self.options.observe_s,
            notice_s=self.options.notice_s,
        )

    def plan(self, request: GroupRequest) -> GroupPlan:
        return self._real.plan(request)

    def submit(self, plan: GroupPlan, launch: Launch) -> GroupHandle | Refusal:
        return self._real.submit(plan, launch)

    def observe(self, handle: GroupHandle) -> GroupStatus:
        return self._real.observe(handle)

    def cancel(self, handle: GroupHandle) -> None:
        self._real.cancel(handle)

    def said(self, handle: GroupHandle, node: int, *, last: int) -> Sequence[Said]:
        return said(self._real, handle, node, last=last)

    def examine(self, storage: str = "") -> Iterator[Finding]:
        """That a simulator answers, then what the cloud itself wants to be sure of."""
        yield look(f"a simulated {self.options.cloud} answers", self.start)
        own = getattr(self._real, "examine", None)
        if own is not None:
            yield from own(storage)

    @property
    def _real(self) -> Provisioner:
        """The cloud's own provisioner, led to the simulator wherever it answers now."""
        url = self.start()
        if self._opened is None or self._opened[0] != url:
            access = load_cloud(self.options.cloud).access(url)
            env.set_defaults(access.environment)
            told = {**access.options, **self._of_the_cloud}
            self._opened = (url, open_provisioner(self.options.cloud, told))
        return self._opened[1]

    # --- the simulator -----------------------------------------------------------------------

    def start(self) -> str:
        """Its address; it is started if it does not answer. Raises `ProvisionError`."""
        if (url := self._address()) is not None:
            return url
        with self._locked():
            if (url := self._address()) is not None:
                return url
            write(self.root / "options.json", encode(self.options))
            start_detached(
                [sys.executable, "-P", "-m", _MODULE, str(self.root)],
                environment=env.everything(),
                directory=self.root,
                output=self.root / "output",
            )
            return self._come_up()

    def ask(self, what: str, told: dict[str, Any] | None = None) -> Any:
        """Have the simulator do something that no cloud offers: 'reclaim', 'capacity', …"""
        status, body = _post(self.start(), OURS + what, encode(told or {}))
        answer = msgspec.json.decode(body)
        if status != 200:
            raise ConfigError(f"The simulated cloud could not {what}: {answer['error']}")
        return answer

    def _come_up(self) -> str:
        clock = SystemClock()
        give_up_at = clock.now() + _UP_WITHIN_S
        while clock.now() < give_up_at:
            if (url := self._address()) is not None:
                return url
            clock.wait(_LOOK_EVERY_S)
        said = (self.root / "output").read_text(errors="replace").strip()
        last = said.rpartition("\n")[2] or "it said nothing"
        raise ProvisionError(f"The simulated cloud in {self.root} did not come up: {last}.")

    def _address(self) -> str | None:
        try:
            url = (self.root / "address").read_text()
            status, body = _post(url, f"{OURS}alive", b"")
        except (OSError, http.client.HTTPException):
            return None
        is_ours = status == 200 and msgspec.json.decode(body).get("cloud") == self.options.cloud
        return url if is_ours else None

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(f"{self.root}.lock", os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def _post(url: str, path: str, body: bytes) -> tuple[int, bytes]:
    address = urlsplit(url)
    wire = http.client.HTTPConnection(str(address.hostname), address.port, timeout=10)
    with contextlib.closing(wire):
        wire.request("POST", path, body)
        reply = wire.getresponse()
        return reply.status, reply.read()


def _root_of(options: SimOptions) -> Path:
    """That of the cloud we live in, or as the options say, or one of this user for this choice."""
    told = env.lookup(ROOT) or options.root
    if told:
        return Path(told).absolute()
    mine = Path(tempfile.gettempdir()) / f"spotfit-{os.getuid()}"
    return mine / f"sim-{options.cloud}-{digest(options, sorted(_shaping()))}"


def _shaping() -> list[tuple[str, str]]:
    """What of our environment says where machines find their bucket and their code.

    By name, and nothing that proves who we are: the digest of it is the name of a directory, and
    who takes new keys keeps the cloud they have. Its machines go on with those it was started with.
    """
    told = ((name, env.lookup(name)) for name in _PLACES)
    return [(name, _without_user(text)) for name, text in told if text]


_PLACES = (
    "AWS_DEFAULT_REGION",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AWS_PROFILE",
    "AWS_REGION",
    "AZURE_STORAGE_ACCOUNT_NAME",
    "AZURE_STORAGE_ENDPOINT",
    "AZURE_STORAGE_USE_EMULATOR",
    "GOOGLE_CLOUD_PROJECT",
    "PYTHONPATH",
)


def _without_user(text: str) -> str:
    """An address without the name and password that some have before the '@', and what follows
    its '?'; any other text as it is."""
    url = urlsplit(text)
    if not url.scheme or not url.netloc:
        return text
    return f"{url.scheme}://{url.netloc.rpartition('@')[2]}{url.path}"
