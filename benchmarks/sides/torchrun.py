"""The program of each rank under torchrun: form the group and run the job."""

import json
import os
import sys

import torch.distributed as dist

from benchmarks import workload
from benchmarks.sides.plain import STORAGE


def main() -> None:
    job = json.loads(sys.argv[1])
    os.environ[STORAGE] = job["storage"]
    dist.init_process_group("gloo")
    workload.find(job["work"])(job["config"])
    # A rank that exits early aborts ranks that are still connected to it.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
