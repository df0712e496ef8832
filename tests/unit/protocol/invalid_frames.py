"""Frames that user code could write to the socket of its worker, for every kind of message."""

from __future__ import annotations

import typing
from typing import Any

import msgspec

from spotfit.protocol.worker_agent import FromWorker

encode = msgspec.json.encode  # with the tag first, as dictionaries are written here
_DEEP = b"[" * 980 + b"]" * 980
_METRICS = {"report_index": 0, "metrics": {}}
_END = {"step": 7, "saved_step": 0}


def _required_fields(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Return values for the required fields, which all have another type than the field."""
    fields = msgspec.structs.fields(kind)
    return {field.encode_name: {"not": "this type"} for field in fields if field.required}


def _invalid_frames() -> dict[str, bytes]:
    frames = {
        "empty": b"",
        "no-json": b"\xff\x00garbage",
        "no-object": b"[1]",
        "no-tag": b'{"report_index":0}',
        "unknown-kind": b'{"type":"dance"}',
        "deep-metrics": b'{"type":"metrics_report","report_index":0,"metrics":{"a":%b}}' % _DEEP,
        "negative-index": encode({"type": "metrics_report", **_METRICS, "report_index": -1}),
        "no-metrics": encode({"type": "files_report", **_METRICS, "metrics": [1]}),
        "no-text": b'{"type":"metrics_report","report_index":0,"metrics":{"a":"\xff"}}',
        "no-directory": encode({"type": "files_report", **_METRICS, "checkpoint_dir_name": "../x"}),
        "large-metrics": encode(
            {"type": "metrics_report", **_METRICS, "metrics": {"a": "x" * (17 * 2**20)}}
        ),
        "large-kind": encode({"type": "rank_zero_broadcast", "kind": "k" * 2_000, "seq": 0}),
        "impossible-segment": encode(
            {"type": "snapshot_report", **_METRICS, "segment": "x" * 9_000}
        ),
    }
    for name, changed in (
        ("metrics", {"metrics": [1]}),
        ("large-metrics", {"metrics": {"a": "x" * (9 * 2**20)}}),
        ("step", {"step": -1}),
        ("large-step", {"step": 2**60}),
        ("error", {"error": "x" * 2_000}),
        ("digest", {"state_digest": "0" * 100}),
    ):
        returned = {"report_count": 0, "save_at_end": {**_END, **changed}}
        frames[f"worker_returned-{name}"] = encode({"type": "worker_returned", **returned})
    for kind in typing.get_args(FromWorker):
        tag = kind.__struct_config__.tag
        start = b'{"type":"%b"' % tag.encode()
        frames[f"{tag}-truncated"] = start
        frames[f"{tag}-nested"] = start + b',"unknown":%b}' % _DEEP
        frames[f"{tag}-not-utf8"] = start + b',"unknown":\xff}'
        if wrong := _required_fields(kind):
            frames[f"{tag}-without-fields"] = start + b"}"
            frames[f"{tag}-wrong-types"] = encode({"type": tag, **wrong})
    return frames


INVALID_FRAMES = _invalid_frames()
"""Frames by a name that begins with the tag of the message, if there is one."""
