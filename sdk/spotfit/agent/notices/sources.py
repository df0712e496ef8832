"""Lookup of notice sources by name: built-in ones and plug-ins (entry point spotfit.notices).

`NodeNotice`: the preemption notice of one node, from all of its sources.

Detection of the cloud that a machine belongs to, for machines that spotfit did not rent.

An SSH host, a Slurm node or a pod may be a spot VM, and only the VM itself receives the notice of
its cloud. The cloud is detected from DMI strings below /sys/class/dmi/id, by the same marks as in
cloud-init. If these are unreadable, the metadata services are probed for one second each: their
link-local address is never routed, so the request cannot leave the network.
"""

from __future__ import annotations

import contextlib
import http.client
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from spotfit.agent.notices import aws, azure, gcp
from spotfit.agent.notices.kubernetes import KubernetesNoticeSource
from spotfit.agent.notices.local_sources import FileNoticeSource, SignalNoticeSource
from spotfit.agent.notices.polled import http_request
from spotfit.agent.ports import NoticeSource
from spotfit.host import env, log, plugins
from spotfit.model.topology import Notice, PreemptionRisk
from spotfit.protocol.agent_leader import NoticeReceived, PreemptionRiskReported

# --- Detection of the cloud -----------------------------------------------------------------------


DMI_DIR = Path("/sys/class/dmi/id")
_AZURE_CHASSIS_TAG = "7783-7084-3265-9085-8269-3286-77"
"""Chassis tag of Azure VMs. The vendor is not sufficient: other Hyper-V hosts have the same."""
_PROBE_TIMEOUT_S = 1.0
_METADATA_ENDPOINT = "http://169.254.169.254"

OpenNoticeSource = Callable[[Callable[[], None]], NoticeSource]
SOURCES: Mapping[str, OpenNoticeSource] = {
    "aws": aws.AwsNoticeSource,
    "azure": azure.AzureNoticeSource,
    "gcp": gcp.GcpNoticeSource,
}


class DetectedCloudNoticeSource:
    """Detects the cloud in a thread and then polls its notice source; none for other machines."""

    def __init__(self, wake: Callable[[], None], *, dmi_dir: Path = DMI_DIR) -> None:
        self._wake = wake
        self._dmi_dir = dmi_dir
        self._source: NoticeSource | None = None
        self.detected = threading.Event()
        """Set when the detection is complete."""
        # Three probes may take three seconds: too long for the event loop of the agent.
        threading.Thread(target=self._detect, name="spotfit-machine-notice", daemon=True).start()

    def poll(self, now: float) -> Notice | PreemptionRisk | None:
        """Return what the detected cloud's source returns; None before and without a cloud."""
        return self._source.poll(now) if self._source is not None else None

    def _detect(self) -> None:
        try:
            cloud = env.read(env.CLOUD) or detect_cloud_by_firmware(self._dmi_dir)
            cloud = detect_cloud_by_metadata() if cloud is None else cloud
            if cloud in SOURCES:
                log.info("notice.cloud_detected", cloud=cloud)
                self._source = SOURCES[cloud](self._wake)
        finally:
            self.detected.set()


def detect_cloud_by_firmware(dmi_dir: Path = DMI_DIR) -> str | None:
    """Return 'aws', 'azure' or 'gcp', '' for other machines, or None if DMI is unreadable.

    `dmi_dir` has the DMI strings of the machine as files, such as `sys_vendor`.
    """
    dmi: dict[str, str] = {}
    for name in ("sys_vendor", "bios_vendor", "bios_version", "product_name", "chassis_asset_tag"):
        with contextlib.suppress(OSError):  # some fields are readable by root only
            if text := (dmi_dir / name).read_text(errors="replace").strip().lower():
                dmi[name] = text
    if not dmi:
        return None
    # Nitro instances name the vendor; Xen instances have a BIOS version such as "4.11.amazon".
    if any("amazon ec2" in text or text.endswith(".amazon") for text in dmi.values()):
        return "aws"
    if dmi.get("product_name") in ("google compute engine", "google"):
        return "gcp"
    return "azure" if dmi.get("chassis_asset_tag") == _AZURE_CHASSIS_TAG else ""


def detect_cloud_by_metadata() -> str:
    """Return the cloud whose metadata service answers: 'aws', 'gcp' or 'azure'; '' if none does.

    Blocks for up to a second for each of the three: call it in a thread. Errors count as no answer.
    """
    gce_host = env.lookup(gcp.ENDPOINT_ENV)
    # Each requires its own header or path, so that no service answers a request for another.
    responds = {
        "aws": _responds(
            env.lookup(aws.ENDPOINT_ENV) or _METADATA_ENDPOINT,
            "/latest/api/token",
            method="PUT",
            headers={"X-aws-ec2-metadata-token-ttl-seconds": "60"},
        ),
        "gcp": _responds(
            f"http://{gce_host}" if gce_host else _METADATA_ENDPOINT,
            "/computeMetadata/v1/instance/id",
            headers={"Metadata-Flavor": "Google"},
        ),
        "azure": _responds(
            env.lookup(azure.ENDPOINT_ENV) or _METADATA_ENDPOINT,
            "/metadata/instance/compute/name?api-version=2021-02-01&format=text",
            headers={"Metadata": "true"},
        ),
    }
    return next((cloud for cloud, is_responding in responds.items() if is_responding), "")


def _responds(url: str, path: str, *, headers: Mapping[str, str], method: str = "GET") -> bool:
    try:
        response = http_request(
            url, path, method=method, headers=headers, timeout_s=_PROBE_TIMEOUT_S
        )
    except (OSError, http.client.HTTPException):
        return False
    return response.status == 200


ENTRY_POINT_GROUP = "spotfit.notices"
_BUILTIN_SOURCES: dict[str, OpenNoticeSource] = {
    **SOURCES,
    "file": FileNoticeSource,
    "kubernetes": KubernetesNoticeSource,
    "machine": DetectedCloudNoticeSource,
    "signal": SignalNoticeSource,
}


def open_notice_source(name: str, wake: Callable[[], None]) -> NoticeSource:
    """Return a new notice source of that name, which watches this machine from now on.

    Built-in names are "aws", "azure", "gcp", "file", "kubernetes", "machine" (detects the cloud)
    and "signal"; others are entry points `spotfit.notices`. The source may call `wake` from any
    thread to be polled at once. Raises `ConfigError` if no source has that name or it cannot be
    loaded, and `MissingExtraError` if a dependency of a plug-in is not installed.
    """
    create = _BUILTIN_SOURCES.get(name) or plugins.load(ENTRY_POINT_GROUP, name)
    source: NoticeSource = create(wake)
    return source


# --- NodeNotice -----------------------------------------------------------------------------------


# Some sources recompute the deadline at each poll; smaller changes are rounding errors.
_MIN_DEADLINE_CHANGE_S = 1.0


class NodeNotice:
    """The notice of this machine with the earliest deadline, and the risks reported to the leader.

    For its agent. Times are event-loop seconds.
    """

    def __init__(self, sources: Sequence[NoticeSource]) -> None:
        self._sources = sources
        self.notice: Notice | None = None
        self.deadline = float("inf")
        """When the machine ends, by the clock of this agent; infinity if that is unknown."""
        self._forwarded_risks: list[PreemptionRisk] = []

    def poll(
        self, now: float, *, is_connected: bool
    ) -> Iterator[NoticeReceived | PreemptionRiskReported]:
        """Poll all sources; yield what the leader has not received yet. Called at each tick.

        Each risk is yielded once, and only while connected to the leader. A notice is yielded when
        it is found or its deadline moves to an earlier time; without a connection it is not
        repeated, because the next `Join` contains it. Iterate to the end: the state is updated
        meanwhile.
        """
        for source in self._sources:
            notice = source.poll(now)
            if isinstance(notice, PreemptionRisk):
                # Once: its only effect is that workers save earlier.
                if is_connected and notice not in self._forwarded_risks:
                    self._forwarded_risks.append(notice)
                    log.info("notice.preemption_risk", reason=notice.reason)
                    yield PreemptionRiskReported(reason=notice.reason)
            elif notice is not None:
                left_s = float("inf") if notice.seconds_left is None else notice.seconds_left
                # A later notice counts if it is more urgent, as when SIGTERM follows a drain.
                if self.notice is None or now + left_s < self.deadline - _MIN_DEADLINE_CHANGE_S:
                    self.notice = notice
                    self.deadline = min(self.deadline, now + left_s)
                    yield NoticeReceived(notice=notice)
