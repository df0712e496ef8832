"""Translation of file systems to roots and credentials."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
from pyarrow import fs

from spotfit.core.errors import ConfigError
from spotfit.store.factory import open_store, to_arrow_filesystem
from spotfit.store.filesystem_bucket import open_arrow_filesystem, resolve_bucket
from spotfit.store.url import RootUrl


def stand_in(kind: str, **attributes: Any) -> Any:
    """Return an object with the class name and attributes of a library that is not installed."""
    module, _, name = kind.rpartition(".")
    made = type(name, (fsspec.AbstractFileSystem,), {"__module__": module, "protocol": "x"})()
    for attribute, value in attributes.items():
        setattr(made, attribute, value)
    return made


def an_s3fs(**changes: Any) -> Any:
    usual: dict[str, Any] = {
        "key": None,
        "secret": None,
        "token": None,
        "anon": False,
        "endpoint_url": None,
        "client_kwargs": {},
        "kwargs": {},
        "use_ssl": True,
    }
    return stand_in("s3fs.core.S3FileSystem", **(usual | changes))


def an_adlfs(**changes: Any) -> Any:
    names = (
        "account_name",
        "account_key",
        "connection_string",
        "sas_token",
        "client_id",
        "client_secret",
        "tenant_id",
    )
    return stand_in("adlfs.spec.AzureBlobFileSystem", **(dict.fromkeys(names) | changes))


def a_gcsfs(*, token: Any = None, endpoint_url: str | None = None) -> Any:
    return stand_in(
        "gcsfs.core.GCSFileSystem",
        credentials=SimpleNamespace(token=token),
        storage_options={"endpoint_url": endpoint_url},
    )


@pytest.mark.parametrize(
    ("filesystem", "address", "keys"),
    [
        (
            fs.S3FileSystem(
                endpoint_override="minio:9000",
                scheme="http",
                access_key="a",
                secret_key="b",
                session_token="c",
                region="eu-west-1",
            ),
            "s3://bucket/runs?endpoint_override=minio:9000&scheme=http&region=eu-west-1",
            {"access_key_id": "a", "secret_access_key": "b", "session_token": "c"},
        ),
        (fs.S3FileSystem(region="eu-west-1"), "s3://bucket/runs?region=eu-west-1", {}),
        (
            fs.S3FileSystem(anonymous=True, region="eu-west-1"),
            "s3://bucket/runs?region=eu-west-1",
            {"skip_signature": "true"},
        ),
        (
            fs.GcsFileSystem(anonymous=True, endpoint_override="here:1", scheme="http"),
            "gs://bucket/runs?endpoint_url=http://here:1",
            {"skip_signature": "true"},
        ),
        (
            fs.AzureFileSystem(account_name="acc", account_key="a2V5"),
            "az://bucket/runs?account_name=acc",
            {"account_key": "a2V5"},
        ),
        (
            fs.AzureFileSystem(
                account_name="acc",
                account_key="a2V5",
                blob_storage_authority="127.0.0.1:10000",
                blob_storage_scheme="http",
            ),
            "az://bucket/runs?account_name=acc&endpoint_url=http://127.0.0.1:10000/acc",
            {"account_key": "a2V5"},
        ),
        (
            an_s3fs(key="a", secret="b", endpoint_url="http://minio:9000"),
            "s3://bucket/runs?endpoint_url=http://minio:9000",
            {"access_key_id": "a", "secret_access_key": "b"},
        ),
        (
            an_s3fs(
                client_kwargs={
                    "endpoint_url": "https://minio",
                    "region_name": "eu-west-1",
                    "aws_access_key_id": "a",
                    "aws_secret_access_key": "b",
                }
            ),
            "s3://bucket/runs?endpoint_url=https://minio&region=eu-west-1",
            {"access_key_id": "a", "secret_access_key": "b"},
        ),
        (an_s3fs(anon=True), "s3://bucket/runs", {"skip_signature": "true"}),
        (a_gcsfs(), "gs://bucket/runs", {}),
        (
            a_gcsfs(token="anon", endpoint_url="http://here:1"),
            "gs://bucket/runs?endpoint_url=http://here:1",
            {"skip_signature": "true"},
        ),
        (
            an_adlfs(account_name="acc", account_key="a2V5"),
            "az://bucket/runs?account_name=acc",
            {"account_key": "a2V5"},
        ),
        (
            an_adlfs(
                connection_string="AccountName=acc;AccountKey=a2V5==;BlobEndpoint=http://here:1/acc/"
            ),
            "az://bucket/runs?account_name=acc&endpoint_url=http://here:1/acc",
            {"account_key": "a2V5=="},
        ),
    ],
)
def test_a_file_system_is_translated_to_root_and_credentials(
    filesystem: Any, address: str, keys: Any
) -> None:
    assert resolve_bucket(filesystem, "bucket/runs") == (RootUrl.parse(address), keys)


@pytest.mark.parametrize(
    "filesystem",
    [
        fs.S3FileSystem(role_arn="arn:aws:iam::1:role/r", region="eu-west-1"),
        an_s3fs(kwargs={"profile": "p"}),
        a_gcsfs(token={"private_key": "secret"}),
    ],
)
def test_credentials_that_cannot_be_passed_on_are_rejected(filesystem: Any) -> None:
    with pytest.raises(ConfigError, match="cannot be passed on to machines") as refused:
        resolve_bucket(filesystem, "bucket/runs")
    assert "secret" not in str(refused.value)


def test_other_file_systems_have_no_bucket() -> None:
    for filesystem in (fs.LocalFileSystem(), fsspec.filesystem("memory")):
        assert resolve_bucket(filesystem, "bucket/runs") is None


@pytest.mark.parametrize(
    ("path", "why"), [("s3://bucket/runs", "has a scheme"), ("/", "no bucket")]
)
def test_a_path_outside_of_the_file_system_is_rejected(path: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        resolve_bucket(fs.S3FileSystem(region="eu-west-1"), path)


# ── back to pyarrow ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "filesystem",
    [
        fs.S3FileSystem(
            endpoint_override="minio:9000",
            scheme="http",
            access_key="a",
            secret_key="b",
            region="eu-west-1",
        ),
        fs.GcsFileSystem(anonymous=True, endpoint_override="here:1", scheme="http"),
    ],
)
def test_a_pyarrow_file_system_round_trips(filesystem: Any) -> None:
    found = resolve_bucket(filesystem, "bucket/runs")
    assert found is not None
    assert open_arrow_filesystem(*found) == filesystem


def test_endpoint_and_region_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    made = to_arrow_filesystem(open_store("s3://bucket/runs"))
    expected = fs.S3FileSystem(endpoint_override="127.0.0.1:9", scheme="http", region="eu-west-1")
    assert made == expected


def test_storage_that_pyarrow_does_not_support_has_none() -> None:
    assert to_arrow_filesystem(open_store("az://files/runs?account_name=acc")) is None
    assert to_arrow_filesystem(open_store("memory://x")) is None
