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
    EnvironmentMismatchError,
    IntegrityError,
    JournalError,
    StoreError,
)
from spotfit.model.events import GroupPlanned
from tests.live.cloud import LiveTestCloud, eventually

Config = dict[str, Any]


def nothing() -> None:
    """Trains nothing."""


def save(name: str = "weights") -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "weights").write_text("1")
        checkpoint = spotfit.Checkpoint.from_directory(folder)
        spotfit.report({"step": 1}, checkpoint=checkpoint, checkpoint_dir_name=name)


# --- what is asked for ---------------------------------------------------------------------------


def test_a_function_that_wants_two_arguments(cloud: LiveTestCloud) -> None:
    def train(config: Config, data: str) -> None: ...

    with pytest.raises(spotfit.ConfigError, match="should take in 0 or 1 required arguments"):
        cloud.fit(train)
    assert cloud.is_untouched


def test_something_that_is_no_function(cloud: LiveTestCloud) -> None:
    with pytest.raises(TypeError, match="must be callable"):
        cloud.fit("train.py")  # type: ignore[arg-type]
    assert cloud.is_untouched


@pytest.mark.parametrize("name", ["../elsewhere", "a/b", "..", " ", ".hidden", "x" * 200])
def test_a_name_that_leaves_its_folder(cloud: LiveTestCloud, name: str) -> None:
    with pytest.raises(spotfit.ConfigError, match="is not a valid directory name"):
        cloud.fit(nothing, name=name)
    assert cloud.is_untouched
    assert not (cloud.folder / "elsewhere").exists()


def test_an_unknown_provisioner_and_the_nearest_there_is(cloud: LiveTestCloud) -> None:
    trainer = cloud.trainer(nothing)
    trainer.provisioner = "locla"
    with pytest.raises(spotfit.ConfigError, match=r"no provisioner 'locla'.*'local'"):
        trainer.fit()
    assert cloud.is_untouched


@pytest.mark.parametrize("given", ["local?nodse=2", "local?nodes=0", "?nodes=2", 7])
def test_options_a_provisioner_does_not_take(cloud: LiveTestCloud, given: Any) -> None:
    trainer = cloud.trainer(nothing)
    trainer.provisioner = given
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
def test_scaling_that_contradicts_itself(scaling: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        spotfit.ScalingConfig(**scaling)


def test_several_mistakes_are_reported_together(cloud: LiveTestCloud) -> None:
    def train(config: Config, data: str) -> None: ...

    trainer = cloud.trainer(train, name="../x", worker_runtime_env={"working_dri": "."})
    trainer.provisioner = "azure_btach"
    with pytest.raises(ConfigErrors, match="Found 4 errors") as raised:
        trainer.fit()
    text = str(raised.value)
    for each in ("0 or 1 required", "'../x'", "working_dir", "azure_btach"):
        assert each in text
    assert cloud.is_untouched


# --- where it is to be kept ----------------------------------------------------------------------


@pytest.mark.parametrize("where", ["/proc/spotfit", "{folder}/a-file/runs", "/dev/null/runs"])
def test_storage_that_cannot_be_written(cloud: LiveTestCloud, where: str) -> None:
    (cloud.folder / "a-file").write_text("in the way")
    with pytest.raises(StoreError) as raised:
        cloud.fit(nothing, storage=where.format(folder=cloud.folder))
    assert not isinstance(raised.value, spotfit.TrainingFailedError)
    assert cloud.is_untouched


@pytest.mark.parametrize(("url", "why"), [("s4://bucket/runs", "s4"), ("s3://", "bucket")])
def test_an_address_that_is_none(cloud: LiveTestCloud, url: str, why: str) -> None:
    with pytest.raises(spotfit.ConfigError, match=why):
        cloud.fit(nothing, storage=url)
    assert cloud.is_untouched


def test_a_bucket_that_is_not_there(cloud: LiveTestCloud, s3: str) -> None:
    with pytest.raises(StoreError, match="no-such-bucket"):
        cloud.fit(nothing, storage=f"s3://no-such-bucket/runs?endpoint_url={s3}")
    assert cloud.is_untouched


class _Deaf(BaseHTTPRequestHandler):
    """Passes everything on, but for the condition that makes `create` what it is."""

    protocol_version = "HTTP/1.1"
    behind: str

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        kept = {
            name: text
            for name, text in self.headers.items()
            if name.lower() not in ("if-none-match", "host", "content-length", "connection")
        }
        request = urllib.request.Request(  # noqa: S310 - loopback
            self.behind + self.path, body or None, kept, method=self.command
        )
        try:
            with urllib.request.urlopen(request) as answer:  # noqa: S310 - loopback
                self._say(answer.status, answer.headers, answer.read())
        except urllib.error.HTTPError as refused:
            self._say(refused.code, refused.headers, refused.read())

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass_on  # noqa: N815 - http.server's names

    def _say(self, status: int, headers: Any, body: bytes) -> None:
        self.send_response(status)
        for name in ("etag", "last-modified", "content-type"):
            if name in headers:
                self.send_header(name, headers[name])
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - http.server's name
        """Say nothing."""


@pytest.fixture
def deaf(s3: str) -> Iterator[str]:
    """The endpoint of a store that ignores 'If-None-Match'."""
    handler = type("Deaf", (_Deaf,), {"behind": s3})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_bucket_whose_create_lies(cloud: LiveTestCloud, s3: str, deaf: str) -> None:
    import boto3

    with pytest.raises(AtomicCreateUnsupportedError, match="Two leaders could be elected"):
        cloud.fit(nothing, storage=f"s3://runs/here?endpoint_url={deaf}")
    assert cloud.is_untouched
    left = boto3.client("s3", endpoint_url=s3).list_objects_v2(Bucket="runs")
    assert left["KeyCount"] == 0, "not even the probe's own objects"


# --- what is there already -----------------------------------------------------------------------


def entry(cloud: LiveTestCloud, slot: int, name: str = "run") -> Path:
    return Path(cloud.url(name), ".spotfit", "journal", f"{slot:020d}.json")


def entries(cloud: LiveTestCloud) -> list[str]:
    return sorted(path.name for path in entry(cloud, 0).parent.iterdir())


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-20]),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_text(json.dumps({"somebody": "else's"})),
        lambda path: path.write_bytes(b"\x00\xff garbage"),
    ],
    ids=["cut", "empty", "foreign", "garbage"],
)
def test_a_journal_that_cannot_be_read(cloud: LiveTestCloud, spoil: Any) -> None:
    cloud.fit(nothing)
    spoil(entry(cloud, 2))
    before = entries(cloud)

    with pytest.raises(JournalError, match="Journal entry 2 cannot be decoded"):
        cloud.fit(nothing)
    with pytest.raises(JournalError, match="Journal entry 2"):
        spotfit.attach(cloud.url())
    assert entries(cloud) == before


def test_a_journal_with_entries_of_another_run(cloud: LiveTestCloud) -> None:
    cloud.fit(nothing)
    cloud.fit(nothing, name="another")
    shutil.copy(entry(cloud, 3, "another"), entry(cloud, 3))
    before = entries(cloud)

    with pytest.raises(JournalError, match="two runs were written to one folder"):
        cloud.fit(nothing)
    assert entries(cloud) == before


@pytest.mark.parametrize("lost", [0, 2])
def test_a_journal_that_lacks_an_entry(cloud: LiveTestCloud, lost: int) -> None:
    cloud.fit(nothing)
    entry(cloud, lost).unlink()
    before = entries(cloud)

    with pytest.raises(JournalError, match=f"Journal entry {lost} .* is missing"):
        cloud.fit(nothing)
    assert entries(cloud) == before


@pytest.mark.parametrize("how", ["gone", "emptied"])
def test_a_checkpoint_whose_directory_is_gone(cloud: LiveTestCloud, how: str) -> None:
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


# --- what somebody has changed -------------------------------------------------------------------


def flip(path: Path) -> None:
    """Another byte in the middle of the file."""
    body = bytearray(path.read_bytes())
    body[len(body) // 2] ^= 0x01
    path.write_bytes(body)


def only(folder: Path) -> Path:
    [found] = folder.iterdir()
    return found


def test_a_function_modified_after_the_upload_is_not_run(cloud: LiveTestCloud) -> None:
    def train(config: Config) -> None:
        (Path(config["marks"]) / "was run").touch()

    handle = cloud.submit(train, local_options={"capacity": 0})
    flip(only(Path(cloud.url(), ".spotfit", "fn")))
    cloud.reclaimer.set_capacity(1)

    with pytest.raises(spotfit.WorkerGroupError, match="was modified after the upload") as raised:
        handle.result(60)
    assert isinstance(raised.value.worker_failures[0], IntegrityError)
    assert not (cloud.marks / "was run").exists()


def test_a_forged_function_is_not_run_even_if_its_name_fits(cloud: LiveTestCloud) -> None:
    """Who may write to the bucket may change the spec as well, but does not hold the key."""
    import hashlib

    handle = cloud.submit(nothing, local_options={"capacity": 0})
    packed = only(Path(cloud.url(), ".spotfit", "fn"))
    flip(packed)
    forged = hashlib.sha256(packed.read_bytes()).hexdigest()
    packed.rename(packed.with_name(f"{forged}.pkl"))
    first = entry(cloud, 0)
    first.write_text(first.read_text().replace(packed.stem, forged))
    cloud.reclaimer.set_capacity(1)

    with pytest.raises(spotfit.WorkerGroupError) as raised:
        handle.result(60)
    assert isinstance(raised.value.worker_failures[0], IntegrityError)


def test_a_result_that_was_changed_is_not_believed(cloud: LiveTestCloud) -> None:
    cloud.fit(lambda: "the truth")
    flip(only(Path(cloud.url(), ".spotfit", "results")))
    with pytest.raises(IntegrityError):
        spotfit.attach(cloud.url()).result(60)


def test_a_checkpoint_that_was_changed_is_not_loaded(cloud: LiveTestCloud) -> None:
    def train() -> None:
        checkpoint = spotfit.get_checkpoint()
        if checkpoint is None:
            save()
            return
        with checkpoint.as_directory():
            raise AssertionError("it was loaded")

    cloud.fit(train)
    flip(Path(cloud.url(), "weights", "weights"))
    with pytest.raises(
        spotfit.WorkerGroupError, match="is corrupt: its size or hash differs"
    ) as raised:
        cloud.fit(train)
    assert isinstance(raised.value.worker_failures[0], IntegrityError)


# --- another world there -------------------------------------------------------------------------


def leaves_a_mark(config: Config) -> None:
    (Path(config["marks"]) / "was run").touch()


def test_machines_said_to_run_another_python_are_not_even_asked_for(cloud: LiveTestCloud) -> None:
    with pytest.raises(
        EnvironmentMismatchError, match=r"the machines run cpython 3\.9\."
    ) as raised:
        cloud.fit(leaves_a_mark, local_options={"python": "3.9"})
    assert "or call fit() from cpython 3.9" in raised.value.do
    assert cloud.is_untouched


def test_an_unexpected_python_version_ends_the_run_on_the_first_machine(
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
        cloud.fit(leaves_a_mark, local_options={"python": ""}, max_failures=-1)
    assert isinstance(raised.value.worker_failures[0], EnvironmentMismatchError)
    assert not (cloud.marks / "was run").exists()
    assert len([event for event in cloud.events() if isinstance(event, GroupPlanned)]) == 1


def test_status_states_why_a_machine_cannot_be_started(cloud: LiveTestCloud) -> None:
    handle = cloud.submit(nothing, local_options={"capacity": 0})
    why = eventually(lambda: handle.status().reason)
    assert "1 nodes were requested; 0 of 0 are free" in why
    handle.cancel()
