"""SkyPilot's API server for tests, with a catalog of a few machines and moto for AWS.

Managed jobs are controlled by the server ("consolidation mode"). Optimizer, queue and jobs
controllers are SkyPilot's; moto has no public subnet, so every launch ends without capacity.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

_START_TIMEOUT_S = 300.0
_START_ATTEMPTS = 5

requires_skypilot = pytest.mark.skipif(
    importlib.util.find_spec("sky") is None or shutil.which("rsync") is None,
    reason="SkyPilot and rsync are not installed; `make sky`",
)

_GPU = (
    "\"{'Gpus': [{'Name': 'V100', 'Manufacturer': 'NVIDIA', 'Count': 1.0, "
    "'MemoryInfo': {'SizeInMiB': 16384}}], 'TotalGpuMemoryInMiB': 16384}\""
)
_CATALOG = {
    "aws/vms.csv": (
        "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,GpuInfo,Price,SpotPrice,"
        "Region,AvailabilityZone,Arch",
        "m6i.xlarge,,,4.0,16.0,,0.192,0.071,us-east-1,use1-az1,x86_64",
        "m6i.xlarge,,,4.0,16.0,,0.192,0.065,us-east-1,use1-az2,x86_64",
        "m6i.2xlarge,,,8.0,32.0,,0.384,0.14,us-east-1,use1-az1,x86_64",
        f"p3.2xlarge,V100,1.0,8.0,61.0,{_GPU},3.06,0.92,us-east-1,use1-az1,x86_64",
        f"p3.2xlarge,V100,1.0,8.0,61.0,{_GPU},3.06,0.92,us-west-2,usw2-az1,x86_64",
    ),
    "aws/images.csv": (
        "Tag,Region,OS,OSVersion,ImageId,CreationDate,BaseImageId",
        *(
            f"skypilot:{tag},{region},ubuntu,22.04,ami-03cf127a,20250101,"  # exists in moto
            for tag in ("custom-gpu-ubuntu", "custom-cpu-ubuntu", "gpu-ubuntu-2004")
            for region in ("us-east-1", "us-west-2")
        ),
    ),
    "aws/instance_quota_mapping.csv": (
        "InstanceType,OnDemandInstanceCode,SpotInstanceCode",
        "m6i.xlarge,L-1216C47A,L-34B43A08",
        "p3.2xlarge,L-417A185B,L-7212CCBC",
    ),
    "common/accelerators.csv": ("AcceleratorName,Clouds,Regions", "V100,AWS,us-east-1"),
    "common/metadata.csv": ("GPU,MemoryGB", "V100,16"),
}


@contextlib.contextmanager
def run_skypilot_server_on_aws(folder: Path) -> Iterator[str]:
    """Run a server with access to moto; yields its URL."""
    with _moto() as cloud, pytest.MonkeyPatch.context() as patch:
        for name, text in {
            "AWS_ENDPOINT_URL": cloud,
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_DEFAULT_REGION": "us-east-1",
        }.items():
            patch.setenv(name, text)
        with run_skypilot_server("aws", folder) as address:
            yield address


@contextlib.contextmanager
def run_skypilot_server(cloud: str, folder: Path, settings: str = "") -> Iterator[str]:
    """Run a server with access to this cloud; yields its URL. The environment of this process
    selects the server for SkyPilot's SDK."""
    home = folder / "home"
    _write_home(home, settings)
    with pytest.MonkeyPatch.context() as patch:
        for name, text in {
            "HOME": str(home),
            "SKYPILOT_DISABLE_USAGE_COLLECTION": "1",
            "SKYPILOT_POD_MEMORY_GB_LIMIT": "6",  # limits controllers and workers
        }.items():
            patch.setenv(name, text)
        patch.delenv("SKYPILOT_DISABLE_LOCAL_API_SERVER", raising=False)
        try:
            port = _start(folder, patch)
            _run_sky(folder, "check", cloud)
            yield f"http://127.0.0.1:{port}"
        finally:
            _run_sky(folder, "api", "stop")


def _write_home(home: Path, settings: str) -> None:
    (home / ".ssh").mkdir(parents=True, exist_ok=True)
    for name, lines in _CATALOG.items():
        path = home / ".sky/catalogs/v8" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines) + "\n")
    consolidated = "jobs:\n  controller:\n    consolidation_mode: true\n"
    (home / ".sky/config.yaml").write_text(consolidated + settings)


def _start(folder: Path, patch: pytest.MonkeyPatch) -> int:
    """Start the server and return its port. SkyPilot's own timeout of a minute is too short on a
    busy machine. The server uses a second port that is derived from this one."""
    for _ in range(_START_ATTEMPTS - 1):
        with contextlib.suppress(subprocess.CalledProcessError):
            return _start_at(_free_port(), folder, patch)
    return _start_at(_free_port(), folder, patch)


def _start_at(port: int, folder: Path, patch: pytest.MonkeyPatch) -> int:
    patch.setenv("SKYPILOT_API_SERVER_LOCAL_PORT", str(port))
    try:
        _run_sky(folder, "api", "start")
    except subprocess.CalledProcessError:
        _run_sky(folder, "api", "stop")  # it may still be starting
        raise
    return port


def _run_sky(folder: Path, *arguments: str) -> None:
    """Run a command of SkyPilot; its output is stored next to its home directory."""
    environment = {
        name: text
        for name, text in os.environ.items()
        if name not in ("SKYPILOT_DISABLE_LOCAL_API_SERVER", "SKYPILOT_API_SERVER_ENDPOINT")
    }
    folder_of_python = Path(sys.executable).parent
    environment["PATH"] = f"{folder_of_python}:{environment['PATH']}"
    with (folder / "sky.log").open("ab") as log:
        subprocess.run(
            [folder_of_python / "sky", *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            timeout=_START_TIMEOUT_S,
            check=True,
        )


@contextlib.contextmanager
def _moto() -> Iterator[str]:
    from moto.server import ThreadedMotoServer

    moto = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    moto.start()
    try:
        host, port = moto.get_host_and_port()
        yield f"http://{host}:{port}"
    finally:
        threading.Thread(target=moto.stop, daemon=True).start()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
