"""Recognition of exceptions that a worker raises because another worker has ended.

All training libraries notice a lost peer by a closed connection, within half a second. Such an
exception often reaches the leader before the death or the lost machine that caused it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from spotfit.model.events import RankFailure

# By library, the names of its exceptions, and parts of their messages. Each message names a broken
# connection of the library itself: the same words of another exception may be the user's own error,
# for example of a database client.
_SECONDARY_ERRORS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    # torch with gloo: the message names the file of gloo's transport.
    (
        ("RuntimeError", "DistBackendError"),
        (r"gloo/transport/\S+\] .*(?:closed|reset|[Bb]roken pipe|[Tt]imed out)",),
    ),
    # torch with NCCL, and its store.
    (
        ("DistBackendError",),
        (
            r"remote process exited or there was a network error",
            r"ncclRemoteError",
            r"NCCL communicator was aborted",
            r"[Cc]onnection (?:reset|closed) by",
        ),
    ),
    (
        ("DistNetworkError", "DistStoreError", "DistBackendError"),
        (r"failed to recv, got 0 bytes", r"[Cc]onnection reset", r"[Bb]roken pipe"),
    ),
    (
        ("XGBoostError",),
        (
            r"Ring [Aa]ll(?:reduce|gather) failed",
            r"Encountered EOF",
            r"Poll error condition",
            r"[Cc]onnection (?:reset|closed|refused)",
        ),
    ),
    (("LightGBMError",), (r"Socket (?:recv|send) error",)),
    (("UnavailableError", "AbortedError"), (r"Collective ops is aborted",)),
    (
        ("JaxRuntimeError", "XlaRuntimeError"),
        (r"Gloo .*failed", r"[Cc]onnection (?:reset|closed) by peer"),
    ),
)


def _pattern(names: tuple[str, ...], texts: tuple[str, ...]) -> re.Pattern[str]:
    # The line that names the exception, and its message, which may have several lines.
    return re.compile(
        rf"^(?:[\w.]+\.)?(?:{'|'.join(names)}): (?:.|\n)*?(?:{'|'.join(texts)})", re.MULTILINE
    )


_PATTERNS = tuple(_pattern(names, texts) for names, texts in _SECONDARY_ERRORS)


def is_secondary(failure: RankFailure) -> bool:
    """Whether the failure is an exception of a training library about a peer that is gone.

    The texts are those of torch (gloo, NCCL), XGBoost, LightGBM, TensorFlow and JAX. An exception
    that user code raised while it handled such an exception counts, too. If no other failure
    explains it, it is still the failure of the round.
    """
    return failure.kind == "raised" and any(
        pattern.search(failure.message) for pattern in _PATTERNS
    )


def are_all_secondary(failures: Iterable[RankFailure]) -> bool:
    """Whether there are failures, and each follows from another failure that is not among them."""
    reported = tuple(failures)
    return bool(reported) and all(map(is_secondary, reported))
