"""Every store against the conformance suite."""

import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spotfit.checkpoint.checkpoint_dir import Checkpoint, store_path
from spotfit.checkpoint.writer import save_existing_files
from spotfit.store.api import Store
from spotfit.store.factory import open_store, to_arrow_filesystem
from spotfit.store.filesystem import FsspecStore, open_filesystem_store
from spotfit.store.filesystem_bucket import resolve_bucket
from spotfit.store.transfer import list_files
from spotfit.testing.store_suite import StoreSuite
from tests import azurite, ceph_rgw, fake_gcs
from tests.gcs_server import service_account_key
from tests.s3_server import make_bucket, run_s3_server
from tests.unit.checkpoint.saved_checkpoints import make_manifest


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """The URL of an S3 server with a bucket named 'bucket', in a separate process."""
    with run_s3_server() as url:
        yield url


@pytest.fixture(scope="module")
def gcs() -> Iterator[str]:
    """The URL of a Google Cloud Storage server, in a separate process."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.gcs_server"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", service_account_key(url))
            yield url
        assert server.stdin is not None
        server.stdin.close()


@pytest.fixture(scope="module")
def gcs_json() -> Iterator[str]:
    """The URL of a server of Google Cloud Storage's JSON API, in a separate process."""
    program = fake_gcs.find_fake_gcs()
    if program is None:
        pytest.skip("fake-gcs-server is not installed; `make filesystems`")
    with fake_gcs.run_fake_gcs(program) as url:
        yield url


@pytest.fixture(scope="module")
def azure() -> Iterator[str]:
    """The URL of an account of Azurite, in a separate process."""
    program = azurite.find_azurite()
    if program is None:
        pytest.skip("Azurite is not installed; `make azurite`, which needs npm")
    with azurite.run_azurite(program) as url, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AZURE_STORAGE_ACCOUNT_KEY", azurite.KEY)
        yield url


@pytest.fixture(scope="module")
def ceph(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of Ceph's gateway with a bucket named 'bucket'."""
    with (
        ceph_rgw.run_ceph_gateway(tmp_path_factory.mktemp("ceph")) as url,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("AWS_ACCESS_KEY_ID", ceph_rgw.KEY)
        patch.setenv("AWS_SECRET_ACCESS_KEY", ceph_rgw.SECRET)
        patch.setenv("AWS_REGION", "us-east-1")
        make_bucket(url)
        yield url


class TestLocal(StoreSuite):
    @pytest.fixture
    def store(self, tmp_path_factory: pytest.TempPathFactory) -> Store:
        return open_store(tmp_path_factory.mktemp("store"))


class TestMemory(StoreSuite):
    is_shared = False

    @pytest.fixture
    def store(self) -> Store:
        return open_store(f"memory://{uuid.uuid4().hex}/folder")


class TestS3(StoreSuite):
    @pytest.fixture
    def store(self, s3: str) -> Store:
        return open_store(f"s3://bucket/{uuid.uuid4().hex}?endpoint_url={s3}")

    def test_folders_that_pyarrow_creates_are_not_files(self, store: Store, tmp_path: Path) -> None:
        fs = pytest.importorskip("pyarrow.fs")
        (tmp_path / "ck" / "sub").mkdir(parents=True)
        (tmp_path / "ck" / "sub" / "empty").touch()
        (tmp_path / "ck" / "empty").mkdir()
        filesystem = to_arrow_filesystem(store)
        target = f"{store_path(store)}/ck"
        filesystem.create_dir(f"{target}/empty")
        fs.copy_files(str(tmp_path / "ck"), target, destination_filesystem=filesystem)
        assert {info.key for info in store.list("ck")} > {"ck/sub", "ck/empty"}, "as objects"
        assert list_files(store, "ck") == {"sub/empty": 0}
        with Checkpoint(target, filesystem).as_directory() as directory:
            assert [path.name for path in Path(directory, "sub").iterdir()] == ["empty"]
        manifest = save_existing_files(store, make_manifest("ck"))
        assert [file.name for file in manifest.files] == ["sub/empty"]


@ceph_rgw.requires_ceph
@pytest.mark.slow
@pytest.mark.timeout(600)
class TestCeph(StoreSuite):
    @pytest.fixture
    def store(self, ceph: str) -> Store:
        return open_store(f"s3://bucket/{uuid.uuid4().hex}?endpoint_url={ceph}")


@pytest.mark.usefixtures("gcs")
class TestGoogle(StoreSuite):
    @pytest.fixture
    def store(self) -> Store:
        return open_store(f"gs://bucket/{uuid.uuid4().hex}")


class TestAzure(StoreSuite):
    @pytest.fixture
    def store(self, azure: str) -> Store:
        where = f"account_name={azurite.ACCOUNT}&endpoint_url={azure}"
        return open_store(f"az://{azurite.CONTAINER}/{uuid.uuid4().hex}?{where}")


class TestFsspecLocal(StoreSuite):
    @pytest.fixture
    def store(self, tmp_path_factory: pytest.TempPathFactory) -> Store:
        local = pytest.importorskip("fsspec").filesystem("file")
        return open_filesystem_store(local, str(tmp_path_factory.mktemp("store")))


class TestFsspecMemory(StoreSuite):
    is_shared = False

    @pytest.fixture
    def store(self) -> Store:
        memory = pytest.importorskip("fsspec").filesystem("memory")
        return open_filesystem_store(memory, f"/{uuid.uuid4().hex}")


# ── s3fs, gcsfs and adlfs ────────────────────────────────────────────────────────────────────────
#
# `make filesystems` runs these classes, which have FsspecOver in their names. TestFsspecOverS3,
# -Google and -Azure open the bucket behind the file system with our own driver (0021). The others
# use the requests of the library, as for a file system that our driver does not replace.


GCSFS_MISSING = "gcsfs is not installed; `make filesystems`"
LARGE_BODY = "ignore:Sending a large body directly:ResourceWarning"
"""aiohttp's, when gcsfs or adlfs uploads a file."""


def open_s3fs(url: str) -> Any:
    s3fs = pytest.importorskip("s3fs", reason="s3fs is not installed; `make filesystems`")
    return s3fs.S3FileSystem(endpoint_url=url)


def open_gcsfs(url: str) -> Any:
    # The class of the package asks Google for the kind of bucket, over gRPC, which no server here
    # answers; for buckets of the usual kind it does what its base class does.
    gcsfs = pytest.importorskip("gcsfs.core", reason=GCSFS_MISSING)
    return gcsfs.GCSFileSystem(token="anon", endpoint_url=url)


def open_adlfs(url: str) -> Any:
    adlfs = pytest.importorskip("adlfs", reason="adlfs is not installed; `make filesystems`")
    account = (
        f"DefaultEndpointsProtocol=http;AccountName={azurite.ACCOUNT};"
        f"AccountKey={azurite.KEY};BlobEndpoint={url};"
    )
    return adlfs.AzureBlobFileSystem(connection_string=account)


class TestFsspecOverS3(StoreSuite):
    @pytest.fixture
    def store(self, s3: str) -> Store:
        return open_filesystem_store(open_s3fs(s3), f"bucket/{uuid.uuid4().hex}")


class TestFsspecOverS3fs(StoreSuite):
    @pytest.fixture
    def store(self, s3: str) -> Store:
        return FsspecStore(open_s3fs(s3), f"bucket/{uuid.uuid4().hex}")


class TestFsspecOverGoogle(StoreSuite):
    @pytest.fixture
    def store(self, gcs: str) -> Store:
        return open_filesystem_store(open_gcsfs(gcs), f"bucket/{uuid.uuid4().hex}")

    def test_a_token_passed_by_position_is_used(self, gcs: str) -> None:
        gcsfs = pytest.importorskip("gcsfs.core", reason=GCSFS_MISSING)
        filesystem = gcsfs.GCSFileSystem("project", "full_control", "anon", endpoint_url=gcs)
        resolved = resolve_bucket(filesystem, "bucket/runs")
        assert resolved is not None
        assert resolved[1] == {"skip_signature": "true"}


@pytest.mark.filterwarnings(LARGE_BODY)
class TestFsspecOverGcsfs(StoreSuite):
    @pytest.fixture
    def store(self, gcs_json: str) -> Store:
        return FsspecStore(open_gcsfs(gcs_json), f"{fake_gcs.BUCKET}/{uuid.uuid4().hex}")


@pytest.mark.timeout(300)  # the first import of adlfs loads Azure's packages
class TestFsspecOverAzure(StoreSuite):
    @pytest.fixture
    def store(self, azure: str) -> Store:
        return open_filesystem_store(open_adlfs(azure), f"{azurite.CONTAINER}/{uuid.uuid4().hex}")


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings(LARGE_BODY)
class TestFsspecOverAdlfs(StoreSuite):
    supports_create = False  # FsspecStore requires an argument `mode`, not one among **kwargs

    @pytest.fixture
    def store(self, azure: str) -> Store:
        return FsspecStore(open_adlfs(azure), f"{azurite.CONTAINER}/{uuid.uuid4().hex}")

    @pytest.mark.xfail(reason="adlfs parses paths as URLs, and ends them at '?' and '#'")
    def test_unusual_keys_are_listed_unchanged(self, store: Store) -> None:
        super().test_unusual_keys_are_listed_unchanged(store)


class TestArrowLocal(StoreSuite):
    @pytest.fixture
    def store(self, tmp_path_factory: pytest.TempPathFactory) -> Store:
        fs = pytest.importorskip("pyarrow.fs")
        return open_filesystem_store(fs.LocalFileSystem(), str(tmp_path_factory.mktemp("store")))


class TestArrowOverS3(StoreSuite):
    @pytest.fixture
    def store(self, s3: str) -> Store:
        fs = pytest.importorskip("pyarrow.fs")
        server = s3.removeprefix("http://")
        s3fs = fs.S3FileSystem(endpoint_override=server, scheme="http", region="us-east-1")
        return open_filesystem_store(s3fs, f"bucket/{uuid.uuid4().hex}")
