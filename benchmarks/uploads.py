"""Duration of report() with a checkpoint to S3: one large file, and many small ones.

Both sides write to the same server. moto uses one process, and much of the time is its own.
`SPOTFIT_BENCH_S3=http://host:port`, with credentials in the environment, selects another server.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from statistics import median

from benchmarks import bucket
from benchmarks.measure import Figure, PeerTarget, Reading, main, requested
from benchmarks.peers import RAY, RAY_TUNED, Setting
from benchmarks.run_once import Job, Run

REPORTS = 3
KINDS = {
    "one": ("one file of 256 MiB", {"files": 1, "bytes_each": 256 * 2**20}),
    "many": ("1,000 files of 64 KiB", {"files": 1000, "bytes_each": 64 * 2**10}),
}


def job(kind: str) -> Job:
    """Return a job on an empty bucket."""
    server = bucket.server()
    server.clear()
    config = KINDS[kind][1] | {"reports": REPORTS}
    return Job("upload", config, workers=1, storage=server.url, environment=server.environment)


def read(run: Run) -> Reading | None:
    uploads = run.events.named("uploaded")
    if len(uploads) != REPORTS:
        return None
    took = [upload.fields["took_s"] for upload in uploads]
    return Reading(median(took), uploads[0].at - took[0], uploads[-1].at, {"first_s": took[0]})


def figure(kind: str) -> Figure:
    def of(_: Setting) -> Job:
        return job(kind)

    return Figure(
        name=f"uploads_{kind}",
        title=f"report() with a checkpoint to S3 ({bucket.server_name()}), {KINDS[kind][0]}",
        unit="s",
        job=of,
        read=read,
        peer_targets=(PeerTarget(RAY_TUNED, target=1.5), PeerTarget(RAY, target=1.5)),
        limit_s=180.0,
        also=(("first_s", "the first upload of a run (s)"),),
    )


if __name__ == "__main__":
    for kind in requested(KINDS):
        main(figure(kind))
