"""`tf.train.Example` messages by Google's protobuf library."""

from __future__ import annotations

from typing import Any

from google.protobuf import (  # type: ignore[import-untyped]
    descriptor_pb2,
    descriptor_pool,
    message_factory,
)

_FIELD = descriptor_pb2.FieldDescriptorProto


def _example_class() -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="tf", syntax="proto3")

    def add(message: Any, name: str, number: int, kind: int, *, repeated: bool = False) -> Any:
        label = _FIELD.LABEL_REPEATED if repeated else _FIELD.LABEL_OPTIONAL
        return message.field.add(name=name, number=number, type=kind, label=label)

    for name, kind in (
        ("BytesList", _FIELD.TYPE_BYTES),
        ("FloatList", _FIELD.TYPE_FLOAT),
        ("Int64List", _FIELD.TYPE_INT64),
    ):
        add(file.message_type.add(name=name), "value", 1, kind, repeated=True)
    feature = file.message_type.add(name="Feature")
    feature.oneof_decl.add(name="kind")
    for number, name in enumerate(("bytes_list", "float_list", "int64_list"), 1):
        one = add(feature, name, number, _FIELD.TYPE_MESSAGE)
        one.type_name = ".tf." + name.title().replace("_", "")
        one.oneof_index = 0
    features = file.message_type.add(name="Features")
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    add(entry, "key", 1, _FIELD.TYPE_STRING)
    add(entry, "value", 2, _FIELD.TYPE_MESSAGE).type_name = ".tf.Feature"
    add(
        features, "feature", 1, _FIELD.TYPE_MESSAGE, repeated=True
    ).type_name = ".tf.Features.FeatureEntry"
    example = file.message_type.add(name="Example")
    add(example, "features", 1, _FIELD.TYPE_MESSAGE).type_name = ".tf.Features"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tf.Example"))


_Example = _example_class()


def encode_example(features: dict[str, list[Any]]) -> bytes:
    """Return a message with these values; an empty list is a feature without a kind."""
    example = _Example()
    for name, values in features.items():
        feature = example.features.feature[name]
        if values:
            kind = {bytes: "bytes_list", float: "float_list", int: "int64_list"}[type(values[0])]
            getattr(feature, kind).value.extend(values)
    body: bytes = example.SerializeToString()
    return body
