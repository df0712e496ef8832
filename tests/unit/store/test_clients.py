import hashlib
from pathlib import Path

import pytest

from spotfit.store.clients import build_client
from spotfit.store.factory import open_store
from spotfit.store.url import RootUrl
from tests.unit.store.conftest import ScriptedBucket


def config_of(text: str) -> dict[str, object]:
    return dict(build_client(RootUrl.parse(text), {}, for_transfers=False).config)


def test_endpoint_region_and_account_come_from_the_url() -> None:
    s3 = config_of("s3://bucket/x?endpoint_url=http://127.0.0.1:9&region=eu-west-1")
    assert (s3["endpoint_url_s3"], s3["region"]) == ("http://127.0.0.1:9", "eu-west-1")
    assert config_of("gs://bucket?endpoint_url=http://127.0.0.1:9")["base_url"] == (
        "http://127.0.0.1:9"
    )
    assert config_of("az://files?account_name=acc")["account_name"] == "acc"


def test_explicit_credentials_replace_those_of_the_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "of the environment")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of the environment")
    keys = {"access_key_id": "given", "secret_access_key": "secret"}
    s3 = dict(build_client(RootUrl.parse("s3://bucket"), keys, for_transfers=False).config)
    assert (s3["access_key_id"], s3["secret_access_key"]) == ("given", "secret")
    anonymous = {"skip_signature": "true"}
    for text in ("s3://bucket", "gs://bucket", "az://files?account_name=a"):
        config = dict(build_client(RootUrl.parse(text), anonymous, for_transfers=False).config)
        assert config["skip_signature"] == "true"


@pytest.mark.parametrize(
    ("text", "variables", "unsigned"),
    [
        ("s3://bucket", {}, True),
        ("s3://bucket?endpoint_url=https://minio:9000", {}, True),
        ("s3://bucket?endpoint_url=http://minio:9000", {}, False),
        ("s3://bucket", {"AWS_ENDPOINT_URL": "http://minio:9000"}, False),
        ("s3://bucket", {"AWS_ENDPOINT_URL_S3": "http://minio:9000"}, False),
        ("s3://bucket", {"AWS_ENDPOINT": "http://minio:9000"}, False),
        ("s3://bucket?endpoint_url=https://a", {"AWS_ENDPOINT_URL": "http://b"}, True),
        ("s3://bucket", {"AWS_UNSIGNED_PAYLOAD": "false"}, False),
    ],
)
def test_bodies_are_signed_only_without_tls(
    text: str, variables: dict[str, str], unsigned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert (config_of(text).get("unsigned_payload") == "true") is unsigned


def test_http_bodies_are_signed_unless_the_environment_disables_it(
    bucket: ScriptedBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(bucket.url)
    store.put("a", b"x")
    monkeypatch.setenv("AWS_UNSIGNED_PAYLOAD", "true")
    store.subtree("b").put("c", b"x")
    assert bucket.body_hashes == [hashlib.sha256(b"x").hexdigest(), "UNSIGNED-PAYLOAD"]


def test_only_transfer_clients_retry_and_not_those_for_creates() -> None:
    root = RootUrl.parse("s3://bucket")
    built = [
        build_client(root, {}, for_transfers=for_transfers, is_retried=is_retried)
        for for_transfers, is_retried in ((False, True), (True, True), (True, False))
    ]
    configs = [client.retry_config for client in built if client.retry_config is not None]
    assert [config["max_retries"] > 0 for config in configs] == [False, True, False]


def test_the_endpoint_may_come_from_the_environment(
    bucket: ScriptedBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = RootUrl.parse(bucket.url).endpoint
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        with monkeypatch.context() as patch:
            patch.setenv(name, endpoint)
            open_store(f"s3://bucket/{name}").put("a", b"x")
    assert sorted(bucket.objects) == [
        "/bucket/AWS_ENDPOINT_URL/a",
        "/bucket/AWS_ENDPOINT_URL_S3/a",
    ]


def test_credentials_of_the_aws_profile_are_used(
    bucket: ScriptedBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("boto3")
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text(
        "[work]\naws_access_key_id = from-profile\naws_secret_access_key = x\n"
    )
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_PROFILE", "work")
    open_store(bucket.url).put("a", b"x")
    assert "Credential=from-profile/" in bucket.authorizations.pop()
