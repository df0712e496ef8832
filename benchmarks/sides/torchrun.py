"""What torchrun starts on each rank: form the group, do the work."""

import json
import os
import sys

import torch.distributed as dist

from benchmarks import work
from benchmarks.sides.plain import STORAGE


def main() -> None:
    job = json.loads(sys.argv[1])
    os.environ[STORAGE] = job["storage"]
    dist.init_process_group("gloo")
    getattr(work, job["work"])(job["config"])
    # A rank that leaves early aborts those that still talk to it.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
