"""Horovod's elastic training on the restarts and checkpoints of spotfit: `hvd.elastic`."""

from spotfit.horovod.torch.elastic.elastic_run import run
from spotfit.horovod.torch.elastic.elastic_sampler import ElasticSampler
from spotfit.horovod.torch.elastic.elastic_state import ObjectState, TorchState

__all__ = ["ElasticSampler", "ObjectState", "TorchState", "run"]
