"""Invalid input raises an error before a machine is requested: what, why and what to do."""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import spotfit
from spotfit.code import version_check
from spotfit.core.errors import (
    AtomicCreateUnsupportedError,
    ConfigErrors,
    ControllerError,
    EnvironmentMismatchError,
    IntegrityError,
    JournalError,
    StoreError,
)
from spotfit.model.events import GroupPlanned
from tests.live.cloud import LiveTestCloud, eventually

Config = dict[str, Any]


def do_nothing() -> None:
    """Does nothing."""


def save(name: str = "weights") -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "weights").write_text("1")
        checkpoint = spotfit.Checkpoint.from_directory(folder)
        spotfit.report({"step": 1}, checkpoint=checkpoint, checkpoint_dir_name=name)


@pytest.fixture
def cloud(cold_cloud: LiveTestCloud) -> LiveTestCloud:
    """Without machines, so that a test can check that none was started."""
    return cold_cloud


# --- configuration --------------------------------------------------------------------------------


def test_function_with_two_parameters_is_rejected(cloud: LiveTestCloud) -> None:
    def train(config: Config, data: str) -> None: ...

    with pytest.raises(spotfit.ConfigError, match="should take in 0 or 1 required arguments"):
        cloud.fit(train)
    assert cloud.is_untouched


def test_non_callable_is_rejected(cloud: LiveTestCloud) -> None:
    with pytest.raises(TypeError, match="must be callable"):
        cloud.fit("train.py")  # type: ignore[arg-type]
    assert cloud.is_untouched


@pytest.mark.parametrize("name", ["../elsewhere", "a/b", "..", " ", ".hidden", "x" * 200])
def test_run_name_that_escapes_the_storage_path_is_rejected(
    cloud: LiveTestCloud, name: str
) -> None:
    with pytest.raises(spotfit.ConfigError, match="is not a valid directory name"):
        cloud.fit(do_nothing, name=name)
    assert cloud.is_untouched
    assert not (cloud.folder / "elsewhere").exists()


def test_unknown_provisioner_is_rejected_with_the_closest_name(cloud: LiveTestCloud) -> None:
    trainer = cloud.trainer(do_nothing)
    trainer.provisioner = "locla"
    with pytest.raises(spotfit.ConfigError, match=r"no provisioner 'locla'.*'local'"):
        trainer.fit()
    assert cloud.is_untouched


@pytest.mark.parametrize("provisioner", ["local?nodse=2", "local?nodes=0", "?nodes=2", 7])
def test_unknown_provisioner_options_are_rejected(cloud: LiveTestCloud, provisioner: Any) -> None:
    trainer = cloud.trainer(do_nothing)
    trainer.provisioner = provisioner
    with pytest.raises(spotfit.ConfigError) as raised:
        trainer.fit()
    assert (
        "nod" in str(raised.value) or "names none" in str(raised.value) or "7" in str(raised.value)
    )
    assert cloud.is_untouched


@pytest.mark.parametrize(
    ("scaling", "why"),
    [
        ({"num_workers": (4, 2)}, "must be <="),
        ({"num_workers": -1}, "cannot be negative"),
        ({"num_workers": [1, 2]}, "an int or a tuple"),
        ({"use_gpu": True, "use_tpu": True}, "both"),
        ({"resources_per_worker": {"GPU": 1}}, "`use_gpu` is False"),
        ({"elastic_resize_monitor_interval_s": -1.0}, "non-negative"),
    ],
)
def test_contradictory_scaling_config_is_rejected(scaling: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        spotfit.ScalingConfig(**scaling)


def test_several_invalid_values_are_reported_together(cloud: LiveTestCloud) -> None:
    def train(config: Config, data: str) -> None: ...

    trainer = cloud.trainer(train, name="../x", worker_runtime_env={"working_dri": "."})
    trainer.provisioner = "azure_btach"
    with pytest.raises(ConfigErrors, match="Found 4 errors") as raised:
        trainer.fit()
    text = str(raised.value)
    for each in ("0 or 1 required", "'../x'", "working_dir", "azure_btach"):
        assert each in text
    assert cloud.is_untouched


# --- storage --------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["/proc/spotfit", "{folder}/a-file/runs", "/dev/null/runs"])
def test_unwritable_storage_is_rejected(cloud: LiveTestCloud, where: str) -> None:
    (cloud.folder / "a-file").write_text("in the way")
    with pytest.raises(StoreError) as raised:
        cloud.fit(do_nothing, storage=where.format(folder=cloud.folder))
    assert not isinstance(raised.value, spotfit.TrainingFailedError)
    assert cloud.is_untouched


@pytest.mark.parametrize(("url", "why"), [("s4://bucket/runs", "s4"), ("s3://", "bucket")])
def test_invalid_storage_url_is_rejected(cloud: LiveTestCloud, url: str, why: str) -> None:
    with pytest.raises(spotfit.ConfigError, match=why):
        cloud.fit(do_nothing, storage=url)
    assert cloud.is_untouched


def test_missing_bucket_is_rejected(cloud: LiveTestCloud, s3: str) -> None:
    with pytest.raises(StoreError, match="no-such-bucket"):
        cloud.fit(do_nothing, storage=f"s3://no-such-bucket/runs?endpoint_url={s3}")
    assert cloud.is_untouched


class _UnconditionalProxy(BaseHTTPRequestHandler):
    """A proxy that removes the condition of `create`."""

    protocol_version = "HTTP/1.1"
    backend_url: str

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        headers = {
            name: text
            for name, text in self.headers.items()
            if name.lower() not in ("if-none-match", "host", "content-length", "connection")
        }
        request = urllib.request.Request(  # noqa: S310 - loopback
            self.backend_url + self.path, body or None, headers, method=self.command
        )
        try:
            with urllib.request.urlopen(request) as response:  # noqa: S310 - loopback
                self._reply(response.status, response.headers, response.read())
        except urllib.error.HTTPError as error:
            self._reply(error.code, error.headers, error.read())

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass_on  # noqa: N815 - http.server's names

    def _reply(self, status: int, headers: Any, body: bytes) -> None:
        self.send_response(status)
        for name in ("etag", "last-modified", "content-type"):
            if name in headers:
                self.send_header(name, headers[name])
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - http.server's name
        """Suppress the access log."""


@pytest.fixture
def unconditional_s3(s3: str) -> Iterator[str]:
    """The endpoint of an S3 server that ignores 'If-None-Match'."""
    handler = type("BoundProxy", (_UnconditionalProxy,), {"backend_url": s3})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_bucket_without_conditional_create_is_rejected(
    cloud: LiveTestCloud, s3: str, unconditional_s3: str
) -> None:
    import boto3

    with pytest.raises(AtomicCreateUnsupportedError, match="Two leaders could be elected"):
        cloud.fit(do_nothing, storage=f"s3://runs/prefix?endpoint_url={unconditional_s3}")
    assert cloud.is_untouched
    remaining = boto3.client("s3", endpoint_url=s3).list_objects_v2(Bucket="runs")
    assert remaining["KeyCount"] == 0, "the objects of the probe are deleted"


# --- existing objects -----------------------------------------------------------------------------


def entry(cloud: LiveTestCloud, slot: int, name: str = "run") -> Path:
    return Path(cloud.url(name), ".spotfit", "journal", f"{slot:020d}.json")


def entries(cloud: LiveTestCloud) -> list[str]:
    return sorted(path.name for path in entry(cloud, 0).parent.iterdir())


@pytest.mark.parametrize(
    "corrupt",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-20]),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_text(json.dumps({"foreign": "entry"})),
        lambda path: path.write_bytes(b"\x00\xff garbage"),
    ],
    ids=["cut", "empty", "foreign", "garbage"],
)
def test_unreadable_journal_raises(cloud: LiveTestCloud, corrupt: Any) -> None:
    cloud.fit(do_nothing)
    corrupt(entry(cloud, 2))
    before = entries(cloud)

    with pytest.raises(JournalError, match=r"Journal entry 2 in .* was changed after entry 3"):
        cloud.fit(do_nothing)
    with pytest.raises(JournalError, match="Journal entry 2"):
        spotfit.attach(cloud.url())
    assert entries(cloud) == before


def test_journal_with_entries_of_another_run_raises(cloud: LiveTestCloud) -> None:
    cloud.fit(do_nothing)
    cloud.fit(do_nothing, name="another")
    shutil.copy(entry(cloud, 3, "another"), entry(cloud, 3))
    before = entries(cloud)

    with pytest.raises(JournalError, match=r"Journal entry 3 in .* was changed after entry 4"):
        cloud.fit(do_nothing)
    assert entries(cloud) == before


@pytest.mark.parametrize("lost", [0, 2])
def test_journal_with_a_missing_entry_raises(cloud: LiveTestCloud, lost: int) -> None:
    cloud.fit(do_nothing)
    entry(cloud, lost).unlink()
    before = entries(cloud)

    with pytest.raises(JournalError, match=f"Journal entry {lost} .* is missing"):
        cloud.fit(do_nothing)
    assert entries(cloud) == before


@pytest.mark.parametrize("how", ["gone", "emptied"])
def test_checkpoint_of_a_removed_directory_raises(cloud: LiveTestCloud, how: str) -> None:
    cloud.fit(save)
    if how == "gone":
        shutil.rmtree(Path(cloud.url(), "weights"))
    else:
        Path(cloud.url(), "weights", "weights").unlink()
    before = entries(cloud)

    with pytest.raises(IntegrityError, match="weights"):
        cloud.fit(save)
    with pytest.raises(IntegrityError, match="weights"):
        spotfit.Result.from_path(cloud.url())
    assert entries(cloud) == before


# --- modified objects -----------------------------------------------------------------------------


def change_byte(path: Path) -> None:
    """Change a byte in the middle of the file."""
    body = bytearray(path.read_bytes())
    body[len(body) // 2] ^= 0x01
    path.write_bytes(body)


def only_file(folder: Path) -> Path:
    [found] = folder.iterdir()
    return found


def test_modified_function_is_not_executed(cloud: LiveTestCloud) -> None:
    def train(config: Config) -> None:
        (Path(config["marks"]) / "was run").touch()

    handle = cloud.submit(train, local_options={"capacity": 0})
    change_byte(only_file(Path(cloud.url(), ".spotfit", "fn")))
    cloud.reclaimer.set_capacity(1)

    with pytest.raises(spotfit.WorkerGroupError, match="was modified after the upload") as raised:
        handle.result(60)
    assert isinstance(raised.value.worker_failures[0], IntegrityError)
    assert not (cloud.marks / "was run").exists()


def test_forged_function_with_a_matching_name_is_not_executed(cloud: LiveTestCloud) -> None:
    """An attacker with write access can change the spec, but has no run key."""
    import hashlib

    def train(config: Config) -> None:
        (Path(config["marks"]) / "was run").touch()

    handle = cloud.submit(train, local_options={"capacity": 0})
    packed = only_file(Path(cloud.url(), ".spotfit", "fn"))
    change_byte(packed)
    forged = hashlib.sha256(packed.read_bytes()).hexdigest()
    packed.rename(packed.with_name(f"{forged}.pkl"))
    first = entry(cloud, 0)
    first.write_text(first.read_text().replace(packed.stem, forged))
    cloud.reclaimer.set_capacity(1)

    with pytest.raises(JournalError, match=r"Journal entry 0 in .* is not authentic"):
        spotfit.attach(cloud.url())
    # The second agent that ends with this error ends the run.
    with pytest.raises(ControllerError, match=r"Journal entry 0 .* is not authentic"):
        handle.result(60)
    assert not (cloud.marks / "was run").exists()


def test_modified_result_is_rejected(cloud: LiveTestCloud) -> None:
    cloud.fit(lambda: "the truth")
    change_byte(only_file(Path(cloud.url(), ".spotfit", "results")))
    with pytest.raises(IntegrityError):
        spotfit.attach(cloud.url()).result(60)


def test_modified_checkpoint_is_not_loaded(cloud: LiveTestCloud) -> None:
    def train() -> None:
        checkpoint = spotfit.get_checkpoint()
        if checkpoint is None:
            save()
            return
        with checkpoint.as_directory():
            raise AssertionError("it was loaded")

    cloud.fit(train)
    change_byte(Path(cloud.url(), "weights", "weights"))
    with pytest.raises(
        spotfit.WorkerGroupError, match=r"is corrupt: its (size|hash) differs"
    ) as raised:
        cloud.fit(train)
    assert isinstance(raised.value.worker_failures[0], IntegrityError)


# --- other machine environments -------------------------------------------------------------------


def write_own_mark(config: Config) -> None:
    (Path(config["marks"]) / "was run").touch()


def test_backend_with_another_python_version_is_rejected_before_submission(
    cloud: LiveTestCloud,
) -> None:
    with pytest.raises(
        EnvironmentMismatchError, match=r"the machines run cpython 3\.9\."
    ) as raised:
        cloud.fit(write_own_mark, local_options={"python": "3.9"})
    assert "or call fit() from cpython 3.9" in raised.value.do
    assert cloud.is_untouched


def test_unexpected_python_version_ends_the_run_on_the_first_machine(
    cloud: LiveTestCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = version_check.local_environment

    def older(packages: Any = ()) -> version_check.SoftwareEnvironment:
        return version_check.SoftwareEnvironment(
            "3.9.1", "cpython", "linux-x86_64", real(packages).packages
        )

    # Only in this process: the machine reads its real version.
    monkeypatch.setattr(version_check, "local_environment", older)

    with pytest.raises(spotfit.WorkerGroupError, match=r"called from cpython 3\.9\.1") as raised:
        cloud.fit(write_own_mark, local_options={"python": ""}, max_failures=-1)
    assert isinstance(raised.value.worker_failures[0], EnvironmentMismatchError)
    assert not (cloud.marks / "was run").exists()
    assert len([event for event in cloud.events() if isinstance(event, GroupPlanned)]) == 1


def test_status_states_why_a_machine_cannot_be_started(cloud: LiveTestCloud) -> None:
    handle = cloud.submit(do_nothing, local_options={"capacity": 0})
    why = eventually(lambda: handle.status().reason)
    assert "1 nodes were requested; 0 of 0 are free" in why
    handle.cancel()
