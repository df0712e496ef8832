"""Recognition of exceptions about a lost peer."""

import pytest

from spotfit.model.events import RankFailure
from spotfit.policy.secondary_errors import are_all_secondary, is_secondary

# As recorded with torch 2.13, XGBoost 3.2, LightGBM 4.7, TensorFlow 2.21 and JAX 0.10; those of
# NCCL and of torch's store from the sources of torch 2.13.
SECONDARY = {
    "gloo reset": "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection "
    "closed by peer [127.0.0.1]:4242",
    "gloo timeout": "RuntimeError: [/x/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting "
    "1800000ms for recv operation to complete",
    "nccl": "torch.distributed.DistBackendError: NCCL error in: /x/ProcessGroupNCCL.cpp:77, "
    "remote process exited or there was a network error, NCCL version 2.30.1\n"
    "ncclRemoteError: A call failed possibly due to a network error",
    "store": "torch.distributed.DistNetworkError: failed to recv, got 0 bytes",
    "xgboost": "xgboost.core.XGBoostError: [10:00:00] /workspace/src/collective/result.cc:78: \n"
    "- [allgather.cc:98|10:00:00]: Ring Allgather failed, current iteration: 0\n"
    "- [socket.cc:12]: Encountered EOF. Other end is likely closed.",
    "lightgbm": "lightgbm.basic.LightGBMError: Socket recv error, Connection reset by peer (code: "
    "104)",
    "tensorflow": "tensorflow.python.framework.errors_impl.UnavailableError: Graph execution "
    "error:\n\nCollective ops is aborted by: Connection reset by peer",
    "jax": "jax.errors.JaxRuntimeError: INTERNAL: Gloo all-reduce failed: Connection closed by "
    "peer [127.0.0.1]:1",
}
OWN = {
    "user": "ValueError: the loss is NaN",
    "database": "ConnectionResetError: [Errno 104] Connection reset by peer",
    "user quotes": "RuntimeError: my server: Connection reset by peer",
    "nccl setup": "torch.distributed.DistBackendError: NCCL error in: /x/ProcessGroupNCCL.cpp:77, "
    "invalid usage, NCCL version 2.30.1",
    "xgboost parameter": "xgboost.core.XGBoostError: value -1 for Parameter max_depth",
    "lightgbm data": "lightgbm.basic.LightGBMError: Length of labels differs from length of data",
}


def raised(error: str) -> RankFailure:
    text = f'Traceback (most recent call last):\n  File "train.py", line 3, in train\n{error}'
    return RankFailure(rank=0, kind="raised", message=text)


@pytest.mark.parametrize("error", SECONDARY.values(), ids=SECONDARY)
def test_errors_about_a_lost_peer_are_secondary(error: str) -> None:
    assert is_secondary(raised(error))


@pytest.mark.parametrize("error", OWN.values(), ids=OWN)
def test_other_errors_are_not_secondary(error: str) -> None:
    assert not is_secondary(raised(error))


def test_an_error_raised_while_handling_one_about_a_lost_peer_is_secondary() -> None:
    text = (
        f"Traceback (most recent call last):\n{SECONDARY['lightgbm']}\n\n"
        "During handling of the above exception, another exception occurred:\n\n"
        "Traceback (most recent call last):\nKeyError: 'model'"
    )
    assert is_secondary(RankFailure(rank=0, kind="raised", message=text))


def test_a_death_is_never_secondary() -> None:
    died = RankFailure(rank=0, kind="died", message=SECONDARY["store"])
    assert not is_secondary(died)


def test_no_failure_is_not_all_secondary() -> None:
    assert not are_all_secondary([])
    assert are_all_secondary([raised(SECONDARY["store"])])
    assert not are_all_secondary([raised(SECONDARY["store"]), raised(OWN["user"])])
