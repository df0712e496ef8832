"""`sim://<cloud>`: the provisioner and client library of a real cloud against a simulator."""

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
from typing import Any, ClassVar
from urllib.parse import urlsplit

import msgspec

from spotfit.core.codec import encode
from spotfit.core.errors import ConfigError, ProvisionError
from spotfit.host import env, plugins
from spotfit.host.system import SystemClock
from spotfit.model.group import GroupHandle, GroupPlan, GroupRequest, GroupStatus
from spotfit.provision.api import (
    AccountCheck,
    MachineOutput,
    Provisioner,
    Refusal,
    Traits,
    fetch_machine_output,
    find_group,
    run_check,
)
from spotfit.provision.launch import AgentLaunchSpec
from spotfit.provision.offers import OfferListing, list_offers
from spotfit.provision.profile import (
    PROVISIONER_ENTRY_POINTS,
    non_default_options,
    open_provisioner,
    parse_options,
)
from spotfit_localsim.clouds.cloud_host import SIM_ROOT_ENV, short_digest, write_atomically
from spotfit_localsim.clouds.options import SimOptions
from spotfit_localsim.clouds.simulator import CONTROL_PREFIX, load_cloud
from spotfit_provisioners.local.processes import start_detached

_MODULE = "spotfit_localsim.clouds.simulator"
# Includes the start of Python and its imports on a loaded machine.
_START_TIMEOUT_S = 20.0
_POLL_INTERVAL_S = 0.02
# From the boot of a simulated machine to the first step: the start of Python and its imports.
_WORKERS_START_S = 10.0


class SimProvisioner:
    """Delegates to the cloud's own provisioner, and starts the simulator when it does not run."""

    name = "sim"
    # A machine knows one simulator only, whatever the options of a backend are.
    network_options: ClassVar = tuple(field.name for field in dataclasses.fields(SimOptions))

    def __init__(self, options: SimOptions, cloud_options: dict[str, Any] | None = None) -> None:
        """`cloud_options` are options of the simulated cloud's own provisioner."""
        self.options = options
        self._cloud_options = cloud_options or {}
        self.root = _resolve_root(options)
        self._cached_provisioner: tuple[str, Provisioner] | None = None

    @classmethod
    def with_options(cls, **options: Any) -> SimProvisioner:
        """Create it from fields of `SimOptions`; other options are the cloud's own."""
        field_names = {field.name for field in dataclasses.fields(SimOptions)}
        sim_options = {name: value for name, value in options.items() if name in field_names}
        cloud_options = {name: value for name, value in options.items() if name not in field_names}
        return cls(parse_options(SimOptions, sim_options), cloud_options)

    @property
    def traits(self) -> Traits:
        """The traits of the cloud, with the simulator's polling interval and notice."""
        options = self.options
        boot_s = max(options.boot_s, options.on_demand_boot_s or 0.0)
        return dataclasses.replace(
            self._cloud_provisioner.traits,
            # The real intervals are minutes; the simulator answers at once.
            observe_interval_s=options.observe_s,
            notice_s=options.notice_s,
            start_time_s=boot_s + _WORKERS_START_S,
            # Its machines are processes of this computer.
            shared_directories="always",
        )

    def plan(self, request: GroupRequest) -> GroupPlan:
        return self._cloud_provisioner.plan(request)

    def submit(self, plan: GroupPlan, launch: AgentLaunchSpec) -> GroupHandle | Refusal:
        return self._cloud_provisioner.submit(plan, launch)

    def find_group(self, plan: GroupPlan, launch: AgentLaunchSpec) -> GroupHandle | None:
        """Ask the provisioner of the simulated cloud."""
        return find_group(self._cloud_provisioner, plan, launch)

    def offers(self, request: GroupRequest) -> OfferListing:
        """Return the offers of the simulated cloud's provisioner, with prices of the simulator.

        Their names begin with the name of that cloud, so that offers of several clouds differ.
        """
        return list_offers(self._cloud_provisioner, request)

    def observe(self, handle: GroupHandle) -> GroupStatus:
        return self._cloud_provisioner.observe(handle)

    def cancel(self, handle: GroupHandle) -> None:
        self._cloud_provisioner.cancel(handle)

    def fetch_machine_output(
        self, handle: GroupHandle, node: int, *, max_lines: int
    ) -> Sequence[MachineOutput]:
        return fetch_machine_output(self._cloud_provisioner, handle, node, max_lines=max_lines)

    def check_account(self, storage: str = "") -> Iterator[AccountCheck]:
        """Check that the simulator responds, then run the checks of the cloud's provisioner."""
        yield run_check(f"the simulated {self.options.cloud} responds", self.start_simulator)
        # Optional in the interface of provisioners.
        own = getattr(self._cloud_provisioner, "check_account", None)
        if own is not None:
            yield from own(storage)

    @property
    def _cloud_provisioner(self) -> Provisioner:
        """The cloud's provisioner, connected to the simulator's current address."""
        url = self.start_simulator()
        # A restarted simulator may have another port.
        if self._cached_provisioner is None or self._cached_provisioner[0] != url:
            access = load_cloud(self.options.cloud).client_access(url)
            env.set_defaults(access.environment)
            all_options = {**access.options, **self._cloud_options}
            # The options may be text, from a string such as 'sim://aws_batch?queues=a,b'.
            kind = plugins.load(PROVISIONER_ENTRY_POINTS, self.options.cloud).Options
            parsed = non_default_options(parse_options(kind, all_options))
            self._cached_provisioner = (url, open_provisioner(self.options.cloud, parsed))
        return self._cached_provisioner[1]

    # --- the simulator -----------------------------------------------------------------------

    def start_simulator(self) -> str:
        """Return the simulator's URL; start it if necessary. Raises `ProvisionError`."""
        if (url := self._address()) is not None:
            return url
        # A local cloud, which may share the parent, requires that only this user can enter it.
        self.root.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.root.mkdir(mode=0o700, exist_ok=True)
        lock = os.open(f"{self.root}.lock", os.O_CREAT | os.O_RDWR, 0o600)
        # Two processes may find no simulator at once; the second one finds the first one's.
        # Closing the file releases the lock.
        with os.fdopen(lock):
            fcntl.flock(lock, fcntl.LOCK_EX)
            if (url := self._address()) is not None:
                return url
            write_atomically(self.root / "options.json", encode(self.options))
            start_detached(
                # -P: a module in the working directory must not shadow one of spotfit.
                [sys.executable, "-P", "-m", _MODULE, str(self.root)],
                environment=env.copy_environment(),
                directory=self.root,
                output=self.root / "output",
            )
            return self._wait_until_up()

    def call_simulator(self, action: str, arguments: dict[str, Any] | None = None) -> Any:
        """Run a control action such as 'reclaim' or 'capacity'.

        Raises `ConfigError` if it fails.
        """
        status, body = _post(
            self.start_simulator(), CONTROL_PREFIX + action, encode(arguments or {})
        )
        answer = msgspec.json.decode(body)
        if status != 200:
            raise ConfigError(f"The simulated cloud failed to {action}: {answer['error']}")
        return answer

    def _wait_until_up(self) -> str:
        clock = SystemClock()
        deadline = clock.now() + _START_TIMEOUT_S
        while clock.now() < deadline:
            if (url := self._address()) is not None:
                return url
            clock.wait(_POLL_INTERVAL_S)
        output = (self.root / "output").read_text(errors="replace").strip()
        last_line = output.rpartition("\n")[2] or "no output"
        raise ProvisionError(
            f"The simulated cloud in {self.root} did not start within "
            f"{_START_TIMEOUT_S:g} s: {last_line}.",
            do=f"Read {self.root / 'output'}.",
        )

    def _address(self) -> str | None:
        try:
            url = (self.root / "address").read_text()
            status, body = _post(url, f"{CONTROL_PREFIX}alive", b"")
        except (OSError, http.client.HTTPException):
            return None
        # The port may belong to another program since the simulator has ended.
        is_this_simulator = (
            status == 200 and msgspec.json.decode(body).get("cloud") == self.options.cloud
        )
        return url if is_this_simulator else None


def _post(url: str, path: str, body: bytes) -> tuple[int, bytes]:
    address = urlsplit(url)
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=10)
    with contextlib.closing(connection):
        connection.request("POST", path, body)
        response = connection.getresponse()
        return response.status, response.read()


def _resolve_root(options: SimOptions) -> Path:
    """Return the directory of the simulator.

    That is the option `root`, on a simulated machine the directory of that machine's cloud unless
    the option is an absolute path, else a per-user directory for these options. Raises
    `ConfigError` on a machine of another cloud, which has no access to that directory.
    """
    own_root = env.lookup(SIM_ROOT_ENV)
    if own_root and not Path(options.root).is_absolute():
        own_cloud = msgspec.json.decode((Path(own_root) / "options.json").read_bytes())["cloud"]
        if own_cloud != options.cloud:
            raise ConfigError(
                f"A machine of the simulated {own_cloud} cannot reach the simulated "
                f"{options.cloud}.",
                do=f"Open {options.cloud!r} on the computer that called fit().",
            )
        return Path(own_root)
    if options.root:
        return Path(options.root).absolute()
    user_dir = Path(tempfile.gettempdir()) / f"spotfit-{os.getuid()}"
    # Machines inherit the environment of the simulator: other settings need another simulator.
    return user_dir / f"sim-{options.cloud}-{short_digest(options, sorted(_location_settings()))}"


def _location_settings() -> list[tuple[str, str]]:
    """Return the environment variables that locate buckets and code, for the directory's digest.

    Credentials are left out: a user with renewed keys keeps the same simulator.
    """
    settings = []
    for name in _LOCATION_VARIABLES:
        if text := env.lookup(name):
            url = urlsplit(text)
            if url.scheme and url.netloc:
                # Without user, password and query.
                text = f"{url.scheme}://{url.netloc.rpartition('@')[2]}{url.path}"
            settings.append((name, text))
    return settings


_LOCATION_VARIABLES = (
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
