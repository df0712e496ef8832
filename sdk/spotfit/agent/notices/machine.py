"""The cloud that this machine is of, whoever has rented it.

A host by ssh, a node of Slurm or a pod may be a spot VM, and its cloud tells the VM alone that it
will be taken away.

Firmware tells which cloud: the kernel shows what it says below /sys/class/dmi/id, without asking
anybody (the marks are those that cloud-init looks for). Only where that cannot be read, the
metadata services are asked, each for a second at most: they answer at an address that no router
passes on. What is found is watched as on machines that the cloud's own provisioner has rented.
"""

from __future__ import annotations

import contextlib
import http.client
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from spotfit.agent.notices import aws, azure, gcp
from spotfit.agent.notices.polled import whole_answer
from spotfit.agent.ports import NoticeSource
from spotfit.host import env, log
from spotfit.model.world import Advice, Notice

DMI = Path("/sys/class/dmi/id")
_AZURE = "7783-7084-3265-9085-8269-3286-77"
"""What Azure writes on the chassis; on Hyper-V elsewhere the vendor is Microsoft, too."""
_PROBE_S = 1.0
_LINK_LOCAL = "http://169.254.169.254"

Open = Callable[[Callable[[], None]], NoticeSource]
SOURCES: Mapping[str, Open] = {
    "aws": aws.AwsNotice,
    "azure": azure.AzureNotice,
    "gcp": gcp.GcpNotice,
}


class MachineNotice:
    """Finds out in a thread of its own where it is, then listens there; elsewhere it is silent."""

    def __init__(self, wake: Callable[[], None], *, dmi: Path = DMI) -> None:
        self._wake = wake
        self._dmi = dmi
        self._source: NoticeSource | None = None
        self.found = threading.Event()
        """Once it is known which cloud this is, if any."""
        threading.Thread(target=self._find, name="spotfit-machine-notice", daemon=True).start()

    def poll(self, now: float) -> Notice | Advice | None:
        return self._source.poll(now) if self._source is not None else None

    def _find(self) -> None:
        try:
            cloud = env.value(env.CLOUD) or by_firmware(self._dmi)
            cloud = by_metadata() if cloud is None else cloud
            if cloud in SOURCES:
                log.info("notice.machine", cloud=cloud)
                self._source = SOURCES[cloud](self._wake)
        finally:
            self.found.set()


def by_firmware(dmi: Path = DMI) -> str | None:
    """'aws', 'azure', 'gcp', or '' for none of them; None where firmware tells nothing."""
    told = dict(_told(dmi))
    if not told:
        return None
    if any("amazon ec2" in text or text.endswith(".amazon") for text in told.values()):
        return "aws"
    if told.get("product_name") in ("google compute engine", "google"):
        return "gcp"
    return "azure" if told.get("chassis_asset_tag") == _AZURE else ""


def by_metadata() -> str:
    """Whose metadata service answers; '' if none does within a second each."""
    asked = {
        "aws": _answers(
            env.lookup(aws.ENDPOINT) or _LINK_LOCAL,
            "/latest/api/token",
            "PUT",
            {"X-aws-ec2-metadata-token-ttl-seconds": "60"},
        ),
        "gcp": _answers(
            f"http://{env.lookup(gcp.ENDPOINT)}" if env.lookup(gcp.ENDPOINT) else _LINK_LOCAL,
            "/computeMetadata/v1/instance/id",
            "GET",
            {"Metadata-Flavor": "Google"},
        ),
        "azure": _answers(
            env.lookup(azure.ENDPOINT) or _LINK_LOCAL,
            "/metadata/instance/compute/name?api-version=2021-02-01&format=text",
            "GET",
            {"Metadata": "true"},
        ),
    }
    return next((cloud for cloud, answers in asked.items() if answers), "")


def _told(dmi: Path) -> Iterator[tuple[str, str]]:
    """What can be read of it, in lower case; some of it only root may read."""
    for name in ("sys_vendor", "bios_vendor", "bios_version", "product_name", "chassis_asset_tag"):
        with contextlib.suppress(OSError):
            if text := (dmi / name).read_text(errors="replace").strip().lower():
                yield name, text


def _answers(url: str, path: str, method: str, headers: Mapping[str, str]) -> bool:
    try:
        answer = whole_answer(url, path, method=method, headers=headers, within_s=_PROBE_S)
    except (OSError, http.client.HTTPException):
        return False
    return answer.status == 200
