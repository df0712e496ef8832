"""Datasets of files in a bucket: versions, ranges, file systems of the user."""

from __future__ import annotations

import io
import pickle
import uuid
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spotfit.core.errors import ConfigError
from spotfit.data.dataset import Dataset
from spotfit.data.file_readers import read_binary_files, read_csv, read_images, read_parquet
from spotfit.store.api import Store
from spotfit.store.factory import open_store
from tests.s3_server import run_s3_server

TABLE = pa.table({"id": np.arange(100), "name": [f"row {n}" for n in range(100)]})


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """The URL of an S3 server with a bucket named 'bucket', in a separate process."""
    with run_s3_server() as url:
        yield url


@pytest.fixture
def folder() -> str:
    return uuid.uuid4().hex


@pytest.fixture
def store(s3: str, folder: str) -> Store:
    """A folder of the bucket with three Parquet files."""
    store = open_store(f"s3://bucket/{folder}?endpoint_url={s3}")
    for number in range(3):
        store.put(f"part-{number}.parquet", parquet_bytes(TABLE))
    store.put("_SUCCESS", b"")
    return store


def parquet_bytes(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, row_group_size=40)
    return sink.getvalue()


def read_all(dataset: Dataset) -> pa.Table:
    return pa.concat_tables(dataset.blocks())


def test_parquet_files_of_a_bucket_are_read(store: Store) -> None:
    dataset = read_parquet(store.url)
    assert dataset.manifest.unit_rows.tolist() == [40, 40, 20] * 3
    again = pickle.loads(pickle.dumps(dataset))
    assert read_all(again).equals(pa.concat_tables([TABLE] * 3))
    versions = {file.version for file in dataset.manifest.source_units[0].files}
    assert versions == {store.head("part-0.parquet").version}


def test_a_file_and_a_folder_are_read_in_the_order_of_the_call(store: Store, folder: str) -> None:
    query = store.url.partition("?")[2]
    store.put("other/last.parquet", parquet_bytes(TABLE.slice(0, 1)))
    paths = [f"s3://bucket/{folder}/{name}?{query}" for name in ("other", "part-1.parquet")]
    dataset = read_parquet(paths, include_paths=True)
    assert list(dict.fromkeys(read_all(dataset)["path"].to_pylist())) == [
        f"bucket/{folder}/other/last.parquet",
        f"bucket/{folder}/part-1.parquet",
    ]


def test_a_replaced_object_is_reported_by_name(store: Store) -> None:
    manifest = read_parquet(store.url).manifest
    store.put("part-1.parquet", parquet_bytes(TABLE.slice(1)))
    assert manifest.read_part(2, 0, 20).num_rows == 20
    with pytest.raises(ConfigError, match=r"part-1\.parquet was changed or deleted"):
        manifest.read_part(3, 0, 1)


def test_an_object_replaced_by_one_of_the_same_content_is_the_same(store: Store) -> None:
    manifest = read_parquet(store.url).manifest
    store.put("part-1.parquet", parquet_bytes(TABLE))
    assert manifest.read_part(3, 0, 40).equals(TABLE.slice(0, 40))


def test_a_deleted_object_is_reported_by_name(store: Store) -> None:
    manifest = read_binary_files(store.url).manifest
    store.delete("part-1.parquet")
    with pytest.raises(ConfigError, match=r"part-1\.parquet was changed or deleted"):
        manifest.read_part(0, 0, 3)


def test_a_part_is_decoded_without_further_requests(store: Store) -> None:
    manifest = read_parquet(store.url).manifest
    assert manifest.is_fetched(3)
    decode = manifest.fetch_part(3, 10, 20)
    store.delete("part-1.parquet")
    assert decode().equals(TABLE.slice(10, 20))


def test_a_missing_folder_is_reported(store: Store, s3: str) -> None:
    with pytest.raises(ConfigError, match="is neither a file nor a folder with files"):
        _ = read_parquet(f"s3://bucket/missing?endpoint_url={s3}").manifest


def test_images_of_a_bucket_are_read(store: Store, s3: str) -> None:
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    pixels = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)
    sink = io.BytesIO()
    image.fromarray(pixels).save(sink, "png")
    for number in range(70):
        store.put(f"images/{number:02}.png", sink.getvalue())
    images = store.subtree("images")
    dataset = read_images(images.url, size=(2, 3))
    assert dataset.manifest.unit_rows.tolist() == [64, 6]
    tensors = read_all(dataset)["image"].combine_chunks().to_numpy_ndarray()
    assert np.array_equal(tensors, np.stack([pixels] * 70))


def test_a_file_system_of_pyarrow_is_read_by_our_driver(store: Store, s3: str, folder: str) -> None:
    fs = pytest.importorskip("pyarrow.fs")
    server = s3.removeprefix("http://")
    filesystem = fs.S3FileSystem(
        access_key="given-key",
        secret_key="something",
        endpoint_override=server,
        scheme="http",
        region="us-east-1",
    )
    for path in (f"bucket/{folder}", f"s3://bucket/{folder}/part-2.parquet"):
        dataset = read_parquet(path, filesystem=filesystem)
        manifest = pickle.loads(pickle.dumps(dataset)).manifest
        assert manifest.read_part(0, 0, 40).equals(TABLE.slice(0, 40))
        assert "given-key" not in repr(manifest.source_units[0].files)


def test_a_public_bucket_is_read_without_credentials(
    store: Store, s3: str, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    boto3 = pytest.importorskip("boto3")
    client = boto3.client("s3", endpoint_url=s3, region_name="us-east-1")
    for info in store.list():
        client.put_object_acl(Bucket="bucket", Key=f"{folder}/{info.key}", ACL="public-read")
    # A request that is signed with these keys is denied by a real server.
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    dataset = read_parquet(f"s3://anonymous@bucket/{folder}?endpoint_url={s3}")
    assert read_all(dataset).num_rows == 300


def test_other_file_systems_are_read_with_their_own_requests() -> None:
    memory = pytest.importorskip("fsspec").filesystem("memory")
    folder = f"/{uuid.uuid4().hex}"
    memory.pipe_file(f"{folder}/k=1/a.csv", b"a\n1\n2\n")
    memory.pipe_file(f"{folder}/b.csv", b"a\n3\n")
    dataset = read_csv(folder, filesystem=memory)
    assert read_all(dataset).to_pydict() == {"a": [3, 1, 2], "k": [None, "1", "1"]}
    memory.pipe_file(f"{folder}/b.csv", b"a\n4\n")
    with pytest.raises(ConfigError, match=r"b\.csv was changed"):
        dataset.manifest.read_part(0, 0, 1)


def test_other_schemes_are_opened_by_fsspec(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("folder/a.csv", "a\n1\n")
    dataset = read_csv(f"zip://folder::file://{tmp_path}/a.zip")
    assert read_all(dataset).to_pydict() == {"a": [1]}
