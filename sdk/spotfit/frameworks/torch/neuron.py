"""Graphs for AWS Neuron: extracted while a function runs, compiled all at once afterwards."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from spotfit.frameworks.torch.backend import bring
from spotfit.host import env

EXTRACTING = {
    "NEURON_PARALLEL_COMPILE": "1",
    "NEURON_EXTRACT_GRAPHS_ONLY": "1",
    "NEURON_FALL_BACK_TO_NULL_NEFF": "1",
}
"""Variables under which a model yields its graphs and nothing of meaning."""


@contextmanager
def compiling_graphs() -> Iterator[None]:
    """Compile what was extracted within, by the first worker of each node."""
    yield
    if env.lookup("LOCAL_RANK") == "0":
        _compile()


def cache_folder(flags: str) -> str | None:
    """The folder that NEURON_CC_FLAGS name for what is compiled, if they do."""
    found = re.search(r"--cache_dir[= ](\S+)", flags)
    return found and found[1]


def _compile() -> None:
    cache = bring("libneuronxla.neuron_cc_cache", package="libneuronxla")
    compiler = bring("libneuronxla.neuron_parallel_compile", package="libneuronxla")
    place = cache.CacheUrl.get_cache_url(cache_folder(env.lookup("NEURON_CC_FLAGS") or ""))
    with tempfile.TemporaryDirectory() as folder:
        compiler.parallel_compile(f"{folder}/", place)
