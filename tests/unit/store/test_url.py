import pickle
import sys
from pathlib import Path, PureWindowsPath

import pytest

from spotfit.core.errors import ConfigError
from spotfit.store import url
from spotfit.store.url import (
    PARTIAL_FILE_PREFIX,
    RootUrl,
    is_local_path,
    validate_file_key,
    validate_key,
)


@pytest.mark.parametrize(
    ("text", "root"),
    [
        ("s3://bucket", RootUrl("s3", "bucket")),
        ("s3://bucket/", RootUrl("s3", "bucket")),
        ("S3://bucket/a/b/", RootUrl("s3", "bucket", "a/b")),
        ("gs://bucket/my run", RootUrl("gs", "bucket", "my run")),
        ("gcs://bucket/a%20b", RootUrl("gs", "bucket", "a b")),
        ("az://container/x?account_name=acc", RootUrl("az", "container", "x", account="acc")),
        ("memory://here", RootUrl("memory", "here")),
        ("/srv/runs", RootUrl("file", prefix="srv/runs")),
        ("/var/../srv/./runs/", RootUrl("file", prefix="srv/runs")),
        ("file:///srv/my%20runs", RootUrl("file", prefix="srv/my runs")),
        ("file://localhost/srv", RootUrl("file", prefix="srv")),
        (Path("/srv/a:b"), RootUrl("file", prefix="srv/a:b")),
    ],
)
def test_an_address_is_parsed_to_a_root(text: str | Path, root: RootUrl) -> None:
    assert RootUrl.parse(text) == root


def test_home_and_working_directory_are_resolved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert RootUrl.parse("~/runs").path == str(Path.home() / "runs")
    assert RootUrl.parse("runs/./x").path == str(tmp_path / "runs" / "x")


@pytest.mark.parametrize(
    "query",
    [
        "endpoint_url=http://127.0.0.1:5000",
        "endpoint_override=127.0.0.1:5000&scheme=http",
        "scheme=https&endpoint_override=http://127.0.0.1:5000",
    ],
)
def test_endpoint_options_of_pyarrow_are_accepted(query: str) -> None:
    root = RootUrl.parse(f"s3://bucket/x?{query}&region=eu-west-1")
    assert (root.endpoint, root.region) == ("http://127.0.0.1:5000", "eu-west-1")


@pytest.mark.parametrize(
    "text",
    [
        "s3://bucket",
        "s3://bucket/50%25 of?endpoint_override=[::1]:9000&scheme=http&region=x",
        "gs://bucket/a%3Fb%23c/ü",
        "az://container/x?account_name=acc&endpoint_url=http://127.0.0.1:10000/acc",
        "/srv/it's 50% of #1?",
        "memory://here/x",
    ],
)
def test_the_text_of_a_root_parses_to_an_equal_root(text: str) -> None:
    root = RootUrl.parse(text)
    assert RootUrl.parse(str(root)) == root
    assert pickle.loads(pickle.dumps(root)) == root


def test_the_path_has_no_scheme_and_options() -> None:
    assert RootUrl.parse("s3://bucket/a/b?region=x").join("run").path == "bucket/a/b/run"
    assert RootUrl.parse("s3://bucket").path == "bucket"
    assert RootUrl.parse("file:///srv/x").join("run").path == "/srv/x/run"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("s4://bucket", ("s4:", "mean 's3://'", "memory://")),
        ("https://bucket.example", ("https:", "Known")),
        ("s3:bucket", ("slashes",)),
        ("s3://", ("no bucket",)),
        ("s3:///x", ("no bucket",)),
        ("s3://bucket/a//b", ("a//b",)),
        ("s3://bucket/../x", ("..",)),
        ("s3://bucket/x#y", ("%23",)),
        ("s3://bucket?regoin=x", ("'regoin'", "'region'")),
        ("s3://bucket?endpoint_url=ftp://x", ("endpoint",)),
        ("file://host/x", ("file:///absolute/path",)),
        ("file:///x?a=b", ("'a'",)),
        ("", ("empty",)),
        ("a\x00b", ("NUL",)),
    ],
)
def test_an_invalid_address_is_explained(text: str, expected: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as raised:
        RootUrl.parse(text)
    for text in expected:
        assert text in str(raised.value)


@pytest.mark.parametrize(
    "text",
    [
        "s3://key:hush@bucket/x",
        "s3://bucket?endpoint_url=http://key:hush@127.0.0.1:9",
        "s3://bucket?secret_key=hush",
        "az://container?sig=hush",
    ],
)
def test_a_secret_in_an_address_is_rejected_and_not_shown(text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        RootUrl.parse(text)
    assert "hush" not in str(raised.value)


def test_a_valid_key_is_returned() -> None:
    assert validate_key("a/..b/.c/d e") == "a/..b/.c/d e"


@pytest.mark.parametrize(
    "key", ["", "/a", "a/", "a//b", "..", "a/../b", "a\n", f"a/{PARTIAL_FILE_PREFIX}1"]
)
def test_an_invalid_key_is_rejected(key: str) -> None:
    with pytest.raises(ConfigError, match="not a valid object key"):
        validate_key(key)


class WindowsPath(PureWindowsPath):
    """A path of Windows with the file system of one laptop."""

    @classmethod
    def cwd(cls) -> "WindowsPath":
        return cls("D:\\laptop")

    def expanduser(self) -> "WindowsPath":
        return WindowsPath(str(self).replace("~", "D:\\laptop"))


@pytest.fixture
def on_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(url, "Path", WindowsPath)


@pytest.mark.usefixtures("on_windows")
@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("C:\\runs\\a", "C:/runs/a"),
        ("d:/runs/../other", "d:/other"),
        ("file:///C:/my%20runs", "C:/my runs"),
        ("runs", "D:/laptop/runs"),
        ("~\\runs", "D:/laptop/runs"),
        ("\\\\server\\share\\runs", "//server/share/runs"),
        ("C:\\", "C:/"),
    ],
)
def test_a_path_of_windows_is_parsed_and_parses_again(text: str, path: str) -> None:
    root = RootUrl.parse(text)
    assert root.path == path
    assert RootUrl.parse(str(root)) == root
    assert is_local_path(str(root))
    assert root.join("run").path.endswith("/run")
    assert RootUrl.parse(str(root.join("run"))) == root.join("run")


@pytest.mark.usefixtures("on_windows")
def test_a_bucket_stays_a_bucket_on_windows() -> None:
    assert RootUrl.parse("s3://bucket/runs") == RootUrl("s3", "bucket", "runs")
    assert not is_local_path("s3://bucket/runs")


def test_a_drive_is_an_unknown_scheme_on_other_systems() -> None:
    assert not is_local_path("C:/runs")
    with pytest.raises(ConfigError, match="has the scheme 'C', which is not supported"):
        RootUrl.parse("C:/runs")


@pytest.mark.parametrize(
    ("scheme", "suggested"),
    [("foo", ""), ("hdfs", ""), ("https", ""), ("fil", "'file://'"), ("azure", "'az://'")],
)
def test_only_a_similar_scheme_is_suggested(scheme: str, suggested: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RootUrl.parse(f"{scheme}://runs")
    hint = f"Did you mean {suggested}? " if suggested else ""
    assert caught.value.do.startswith(f"{hint}Known: az://, file://, gs://, memory://, s3://.")


@pytest.mark.parametrize("key", ["a:b", "a/what?", "a\\..\\b", "folder./x", "end "])
def test_a_key_that_is_no_file_name_of_windows_is_refused_there(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert validate_file_key(key) == key
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(ConfigError, match="not a valid file name on Windows"):
        validate_file_key(key)


def test_ordinary_keys_are_file_names_of_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    key = ".spotfit/journal/00000000000000000001.json"
    assert validate_file_key(key) == key
