"""Properties of this machine."""

import subprocess
import sys
from pathlib import Path

import pytest

from spotfit.host import machine


def test_a_configured_address_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPOTFIT_HOST", "127.0.0.7")
    assert machine.own_address() == "127.0.0.7"


@pytest.mark.parametrize("address", ["127.0.0.1", "127.3.2.1"])
def test_every_loopback_address_belongs_to_the_loopback_interface(address: str) -> None:
    assert machine.interface_with_address(address) == "lo"


@pytest.mark.parametrize("address", ["192.0.2.77", "a-name.example"])
def test_a_foreign_address_has_no_interface(address: str) -> None:
    assert machine.interface_with_address(address) is None


def test_configured_devices_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPOTFIT_DEVICES", "cuda:0, cuda:1,")
    assert machine.devices() == ("cuda:0", "cuda:1")


@pytest.mark.parametrize(
    ("variable", "visible"),
    [
        (None, ("0", "1", "2", "3")),
        ("2,3", ("2", "3")),
        (" 3 , 0", ("3", "0")),
        ("GPU-8932f937,1", ("GPU-8932f937", "1")),
        ("MIG-1,MIG-2,MIG-3,MIG-4,MIG-5", ("MIG-1", "MIG-2", "MIG-3", "MIG-4", "MIG-5")),
        ("1,-1,2", ("1",)),
        ("0,4,1", ("0",)),
        ("NoDevFiles", ()),
        ("", ()),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_does(
    variable: str | None, visible: tuple[str, ...]
) -> None:
    assert machine.visible_gpus(4, variable) == visible


def make_files(folder: Path, *names: str) -> Path:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return folder


CONTROL_NODES = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset")
CARDS = tuple(f"driver/nvidia/gpus/0000:{n:02}:00.0/information" for n in range(8))


@pytest.mark.parametrize(
    ("nodes", "cards", "count"),
    [
        (("nvidia0", "nvidia1", *CONTROL_NODES), CARDS[:2], 2),
        (("nvidia5", *CONTROL_NODES), CARDS, 1),  # a container of GKE: the host's /proc
        (("nvidia0", "nvidia-caps/nvidia-cap1", *CONTROL_NODES), (), 1),  # gVisor; MIG
        ((), CARDS, 8),  # a host on which no program has used a GPU yet
        (CONTROL_NODES, (), 0),
        ((), (), 0),
    ],
)
def test_gpus_are_counted_as_the_container_has_them(
    tmp_path: Path, nodes: tuple[str, ...], cards: tuple[str, ...], count: int
) -> None:
    dev, proc = tmp_path / "dev", tmp_path / "proc"
    make_files(dev, *nodes)
    make_files(proc, *cards)
    assert machine.gpu_count(dev, proc) == count


def test_without_gpus_none_is_visible() -> None:
    assert machine.visible_gpus(0, "0,1") == machine.visible_gpus(0, None) == ()


def test_cpu_count_is_positive() -> None:
    assert machine.cpu_count() >= 1


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"cpu.max": "150000 100000\n"}, 2),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "max 100000\n"}, 8),
        ({"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
        ({"cpu.max": "9900000 100000\n"}, 8),
        ({}, 8),
    ],
)
def test_the_cpu_quota_of_a_container_limits_the_processors(
    files: dict[str, str], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    assert machine.cpu_count(write(tmp_path, files)) == expected


def test_processes_of_one_kernel_have_the_same_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPOTFIT_KUBERNETES_NODE", raising=False)
    monkeypatch.delenv("SPOTFIT_INSTANCE", raising=False)
    own = machine.instance_id()
    code = "from spotfit.host import machine; print(machine.instance_id())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (
        own == other.stdout.strip() == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    )


def test_a_configured_instance_precedes_the_node_of_a_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPOTFIT_KUBERNETES_NODE", "ip-10-0-0-1")
    assert machine.instance_id() == "ip-10-0-0-1"
    monkeypatch.setenv("SPOTFIT_INSTANCE", "i-1")
    assert machine.instance_id() == "i-1"


def test_unknown_user_has_no_login_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may run as a user id without an entry in /etc/passwd."""

    def fail() -> str:
        raise OSError("No username set in the environment")

    monkeypatch.setattr("getpass.getuser", fail)
    assert machine.login_name() == ""
    monkeypatch.setattr("getpass.getuser", lambda: "jane")
    assert machine.login_name() == "jane"
