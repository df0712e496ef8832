"""Buckets behind file systems of others: opened by our driver, with the same credentials."""

from __future__ import annotations

from typing import Any

import fsspec
import pytest
from pyarrow import fs

from spotfit.core.errors import ConfigError
from spotfit.store.native import arrow_for, bucket_behind
from spotfit.store.opening import in_arrow, open_store
from spotfit.store.url import RootUrl


def stand_in(kind: str, **attributes: Any) -> Any:
    """A file system with the class name and the attributes of one that is not installed here."""
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


GCSFS = "gcsfs.core.GCSFileSystem"


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
        (stand_in(GCSFS, storage_options={}), "gs://bucket/runs", {}),
        (
            stand_in(GCSFS, storage_options={"token": "anon", "endpoint_url": "http://here:1"}),
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
def test_a_bucket_behind_a_file_system(filesystem: Any, address: str, keys: Any) -> None:
    assert bucket_behind(filesystem, "bucket/runs") == (RootUrl.parse(address), keys)


@pytest.mark.parametrize(
    "filesystem",
    [
        fs.S3FileSystem(role_arn="arn:aws:iam::1:role/r", region="eu-west-1"),
        an_s3fs(kwargs={"profile": "p"}),
        stand_in(GCSFS, storage_options={"token": {"private_key": "secret"}}),
    ],
)
def test_credentials_that_cannot_travel_are_refused(filesystem: Any) -> None:
    with pytest.raises(ConfigError, match="cannot be passed on to machines") as refused:
        bucket_behind(filesystem, "bucket/runs")
    assert "secret" not in str(refused.value)


def test_others_have_no_bucket_that_we_know() -> None:
    for filesystem in (fs.LocalFileSystem(), fsspec.filesystem("memory")):
        assert bucket_behind(filesystem, "bucket/runs") is None


@pytest.mark.parametrize(
    ("path", "why"), [("s3://bucket/runs", "holds a scheme"), ("/", "no bucket")]
)
def test_a_path_is_one_within_the_file_system(path: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        bucket_behind(fs.S3FileSystem(region="eu-west-1"), path)


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
def test_what_came_from_pyarrow_goes_back(filesystem: Any) -> None:
    found = bucket_behind(filesystem, "bucket/runs")
    assert found is not None
    assert arrow_for(*found) == filesystem


def test_the_environment_names_server_and_region(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    made = in_arrow(open_store("s3://bucket/runs"))
    expected = fs.S3FileSystem(endpoint_override="127.0.0.1:9", scheme="http", region="eu-west-1")
    assert made == expected


def test_what_pyarrow_does_not_know_has_none() -> None:
    assert in_arrow(open_store("az://files/runs?account_name=acc")) is None
    assert in_arrow(open_store("memory://x")) is None
