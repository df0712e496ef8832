"""`spotfit.predict`: check the arguments, run the workers, return the predictions."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, get_args

from spotfit.checkpoint.checkpoint_dir import Checkpoint
from spotfit.client.request import check_directory_is_shared, plan_group
from spotfit.client.run_config import RunConfig, check_config_type, open_run_storage
from spotfit.client.trainer import DataParallelTrainer
from spotfit.core.errors import ConfigError, IntegrityError
from spotfit.core.input_checks import ErrorCollector, did_you_mean
from spotfit.host import log
from spotfit.model.config import ScalingConfig
from spotfit.prediction.batches import (
    OUTPUT_FORMATS,
    Batch,
    BatchFormat,
    FileFormat,
    concatenate,
    decode_file,
    require_packages,
)
from spotfit.prediction.identity import code_fingerprint, identity_of
from spotfit.prediction.predict_loop import PredictionTask, run_prediction
from spotfit.prediction.predictor import PredictorSource
from spotfit.prediction.shard_outputs import (
    PredictionJob,
    PredictionManifest,
    ShardRecord,
    find_manifest,
    output_key,
    read_job,
    read_manifest,
)
from spotfit.prediction.shards import Work, plan_work
from spotfit.store.api import Store
from spotfit.store.factory import open_store, probe_create, with_bucket_region
from spotfit.store.transfer import download_bytes
from spotfit.store.url import is_local_path

if TYPE_CHECKING:
    from spotfit.client.result import Result
    from spotfit.provision.profile import ProvisionerOptions

_OUTPUT_FOLDER = "predictions"
"""Default folder of the outputs in the directory of the run."""


@dataclass
class PredictionResult:
    """The predictions of a finished job, which are read on demand.

    `url`: the folder with one file per shard. `rows`: of all shards. `shards`: in the order of the
    inputs, with their rows, sizes and SHA-256 hashes. `result`: of the run; None if all outputs
    existed, or of a result that was opened with `open`.
    """

    url: str
    rows: int
    shards: tuple[ShardRecord, ...] = field(repr=False)
    output_format: FileFormat
    result: Result | None = None
    _store: Store = field(kw_only=True, repr=False)

    @classmethod
    def open(cls, url: str | PathLike[str]) -> PredictionResult:
        """Open the predictions in that folder. Raises `NotFoundError` if they are not finished."""
        store = open_store(str(fspath(url)), setting="The URL of predictions")
        return _build_result(store, read_manifest(store))

    def iter_shards(self, batch_format: BatchFormat = "numpy") -> Iterator[Batch]:
        """Yield the predictions of each shard, in the order of the inputs.

        Downloads one shard at a time. Raises `IntegrityError` if a file has changed.
        """
        for shard in self.shards:
            key = output_key(shard.name, self.output_format)
            body = download_bytes(self._store, key)
            if hashlib.sha256(body).hexdigest() != shard.sha256:
                raise IntegrityError(
                    f"The file {key} in {self.url} has changed since it was written.",
                    do="Delete the folder and predict again.",
                )
            yield decode_file(body, self.output_format, batch_format)

    def to_numpy(self) -> Batch:
        """Return all predictions in memory, as a dictionary of numpy arrays."""
        return concatenate(list(self.iter_shards("numpy")))

    def to_pandas(self) -> Any:
        """Return all predictions in memory, as one DataFrame."""
        return concatenate(list(self.iter_shards("pandas")))


def _build_result(
    output: Store, manifest: PredictionManifest, result: Result | None = None
) -> PredictionResult:
    return PredictionResult(
        output.url,
        manifest.rows,
        manifest.shards,
        manifest.output_format,
        result,
        _store=output,
    )


def predict(
    predictor: Any,
    inputs: Any,
    *,
    output: str | PathLike[str] | None = None,
    checkpoint: Checkpoint | str | PathLike[str] | None = None,
    fn_constructor_kwargs: Mapping[str, Any] | None = None,
    read: Callable[[Any], Any] | None = None,
    batch_size: int | None = 1024,
    batch_format: BatchFormat = "numpy",
    output_format: FileFormat = "parquet",
    rows_per_shard: int = 10_000,
    scaling_config: ScalingConfig | None = None,
    run_config: RunConfig | None = None,
    provisioner: str | ProvisionerOptions | list[str | ProvisionerOptions] | None = None,
) -> PredictionResult:
    """Predict all inputs on workers and return the predictions. Blocks.

    The inputs are divided into shards. Each shard has one output file, which is created once and
    never replaced, whatever machines are lost. A call with the same arguments continues an
    unfinished job, and of a finished one returns the predictions without renting machines.

    Args:
        predictor: A class whose instances are called with a batch and return one, as for
            `map_batches` of Ray Data; or a function. A batch is a dictionary of numpy arrays.
        inputs: URLs of files or folders (Parquet, CSV, JSON lines, .npy, .npz); a DataFrame, an
            array or a dictionary of arrays; or with `read` the items that it reads.
        output: Folder of the outputs, by default "predictions" in the directory of the run.
        checkpoint: Each worker calls the class with a directory that has the checkpoint's files. A
            subclass of `Predictor` gets the `Checkpoint` in `from_checkpoint`.
        fn_constructor_kwargs: Further arguments of the class.
        read: Called with an item of `inputs` in a thread of a worker; returns the rows of a shard.
        batch_size: The largest number of rows of a batch; None for a whole shard.
        batch_format: "numpy", or "pandas" for batches that are DataFrames.
        output_format: "parquet", "jsonl" or "npz".
        rows_per_shard: For inputs in memory. A shard should take 10 to 60 seconds.
        scaling_config: The workers. `num_workers=(min, max)` uses the machines that there are.
        run_config: Name, storage, limits of cost and failures, as for a trainer.
        provisioner: The backend of the machines, as for a trainer.

    Raises `ConfigError`, `MissingExtraError`, `ShippingError` or `StoreError` before machines are
    requested, else what `DataParallelTrainer.fit` raises.
    """
    source = PredictorSource(
        predictor, _to_checkpoint(checkpoint), dict(fn_constructor_kwargs or {})
    )
    run_config = check_config_type("run_config", run_config, RunConfig)
    errors = ErrorCollector()
    errors.check(source.check)
    errors.check(lambda: _check_count("batch_size", batch_size, optional=True))
    errors.check(lambda: _check_count("rows_per_shard", rows_per_shard))
    errors.check(lambda: _check_choice("batch_format", batch_format, get_args(BatchFormat)))
    errors.check(lambda: _check_choice("output_format", output_format, OUTPUT_FORMATS.values()))
    store = errors.check(lambda: _open_output(output, run_config))
    errors.raise_all()
    # Rows in memory are encoded to plan them, which needs the packages.
    require_packages(reads=(), writes=output_format, batch_format=batch_format)
    work = plan_work(inputs, read=read, rows_per_shard=rows_per_shard, output=store)
    require_packages(reads=work.file_formats(), writes=output_format, batch_format=batch_format)
    task = PredictionTask(
        output_url=store.url,
        job=_describe_job(source, work, (batch_format, output_format), read=read),
        shards=work.shards,
        predictor=source,
        batch_size=batch_size,
        batch_format=batch_format,
    )
    trainer = _PredictionTrainer(task, scaling_config, run_config, provisioner)
    return trainer.run(store, work)


def _to_checkpoint(checkpoint: Checkpoint | str | PathLike[str] | None) -> Checkpoint | None:
    if checkpoint is None or isinstance(checkpoint, Checkpoint):
        return checkpoint
    return Checkpoint(checkpoint)


def _open_output(output: str | PathLike[str] | None, run_config: RunConfig) -> Store:
    if output is None:
        assert run_config.name is not None
        storage = open_run_storage(run_config)
        return with_bucket_region(storage).subtree(run_config.name).subtree(_OUTPUT_FOLDER)
    return with_bucket_region(open_store(str(fspath(output)), setting="output="))


def _check_count(name: str, value: Any, *, optional: bool = False) -> None:
    is_count = isinstance(value, int) and not isinstance(value, bool) and value > 0
    if not is_count and not (optional and value is None):
        raise ConfigError(
            f"{name}={value!r} is not a number of rows greater than 0.",
            do=f"Write {name}=1024" + (", or None for whole shards." if optional else "."),
        )


def _check_choice(name: str, value: Any, known: Any) -> None:
    if value not in known:
        raise ConfigError(f"{name}={value!r} is unknown.", do=did_you_mean(str(value), known))


def _describe_job(
    source: PredictorSource, work: Work, formats: tuple[BatchFormat, FileFormat], *, read: Any
) -> PredictionJob:
    # Not the batch size and the code: after a failure both are corrected, and the job continues.
    arguments = source.identity_arguments()
    parts = [source.predictor, source.checkpoint, arguments, work.fingerprint, formats]
    return PredictionJob(
        fingerprint=hashlib.sha256(identity_of(parts).encode()).hexdigest()[:32],
        code=code_fingerprint(source.predictor, read, *source.arguments.values()),
        shards=len(work.shards),
        output_format=formats[1],
    )


class _PredictionTrainer(DataParallelTrainer):
    """Runs the workers of a prediction."""

    def __init__(
        self,
        task: PredictionTask,
        scaling_config: ScalingConfig | None,
        run_config: RunConfig,
        provisioner: Any,
    ) -> None:
        checkpoints = run_config.checkpoint_config
        assert checkpoints is not None
        # They have only the progress: outputs are never lost, and no round resumes from one.
        if checkpoints.num_to_keep is None:
            kept = dataclasses.replace(checkpoints, num_to_keep=1)
            run_config = dataclasses.replace(run_config, checkpoint_config=kept)
        if run_config.preload is not None:
            preload = (*run_config.preload, *task.predictor.preload_modules())
            run_config = dataclasses.replace(run_config, preload=preload)
        super().__init__(
            run_prediction,
            # The fingerprint distinguishes runs of one name, as their task cannot be compared.
            train_loop_config={"task": task, "fingerprint": task.job.fingerprint},
            scaling_config=scaling_config,
            run_config=run_config,
            provisioner=provisioner,
        )
        self._task = task

    def run(self, output: Store, work: Work) -> PredictionResult:
        """Check the folders, predict what is left, and return the predictions."""
        if self.scaling_config.num_workers != 0:
            self._check_reachable(output, work)
        if self._task.predictor.checkpoint is not None:
            self._task.predictor.checkpoint.check_exists()
        probe_create(output)
        existing = read_job(output, self._task.job)
        if existing is not None and existing.code != self._task.job.code:
            log.warning(
                "predict.code_changed",
                url=output.url,
                text="outputs of the earlier code are kept; delete the folder to replace them",
            )
        if manifest := find_manifest(output):
            return _build_result(output, manifest)
        work.upload(output)
        result = self.fit()
        work.delete_uploads(output)
        return _build_result(output, read_manifest(output), result)

    def _check_reachable(self, output: Store, work: Work) -> None:
        """Raise `ConfigError` if machines cannot access the output, an input or the checkpoint."""
        folders: dict[str, Collection[str]] = {
            "output=...": {output.url},
            "inputs=...": work.folder_urls(),
        }
        checkpoint = self._task.predictor.checkpoint
        if checkpoint is not None and checkpoint.local_directory is not None:
            folders["checkpoint=..."] = {str(checkpoint.local_directory)}
        provisioner = plan_group(self._build_request()).provisioner
        for setting, url in [(name, one) for name, urls in folders.items() for one in urls]:
            if url.startswith("memory:"):
                raise ConfigError(
                    f"{setting.replace('...', url)} exists only in this process.",
                    do="Use a directory or a bucket, or ScalingConfig(num_workers=0).",
                )
            if is_local_path(url):
                check_directory_is_shared(url, provisioner, setting=setting)
