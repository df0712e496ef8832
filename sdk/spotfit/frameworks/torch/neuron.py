"""AWS Neuron: extract a model's graphs while the training function runs, then compile them all."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from spotfit.frameworks.torch.process_group import import_optional
from spotfit.host import env

GRAPH_EXTRACTION_VARIABLES = {
    "NEURON_PARALLEL_COMPILE": "1",
    "NEURON_EXTRACT_GRAPHS_ONLY": "1",
    "NEURON_FALL_BACK_TO_NULL_NEFF": "1",
}
"""Variables under which a model only emits its graphs; the values it computes are meaningless."""


@contextmanager
def compile_extracted_graphs() -> Iterator[None]:
    """After the block, compile the graphs that were extracted in it into the node's cache."""
    yield
    # The cache is shared by the node's workers: one compilation per node is enough.
    if env.lookup("LOCAL_RANK") == "0":
        cache = import_optional("libneuronxla.neuron_cc_cache", package="libneuronxla")
        compiler = import_optional("libneuronxla.neuron_parallel_compile", package="libneuronxla")
        url = cache.CacheUrl.get_cache_url(cache_folder(env.lookup("NEURON_CC_FLAGS") or ""))
        with tempfile.TemporaryDirectory() as folder:
            compiler.parallel_compile(f"{folder}/", url)


def cache_folder(flags: str) -> str | None:
    """Return the `--cache_dir` of NEURON_CC_FLAGS, or None if the flags do not set it."""
    found = re.search(r"--cache_dir[= ](\S+)", flags)
    return found and found[1]
