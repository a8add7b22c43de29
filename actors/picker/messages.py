"""Envoy's external processing, as far as a picker uses it: its messages, by the names and numbers of `envoy.service.ext_proc.v3`.

Declared here and not taken from a package: `xds-protos`, which has them all, brings old copies of OpenTelemetry's modules that overwrite those of
the tracer. What is not declared is passed over, as protocol buffers do. Envoy itself is the judge (`tests/gateway`).
"""

from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2

SERVICE: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
METHOD: Final = "Process"

NONE, STREAMED, BUFFERED, BUFFERED_PARTIAL, FULL_DUPLEX_STREAMED = range(5)
"""How a gateway sends bodies (`ProcessingMode.BodySendMode`)."""

OVERWRITE_IF_EXISTS_OR_ADD: Final = 2

_PACKAGE: Final = "headwater.ext_proc"
_STRUCTS: Final = "map of structs"
_REPEATED: Final = "repeated "
_ONEOFS: Final = {"ProcessingRequest": ("request", 7), "ProcessingResponse": ("response", 7)}
"""The messages whose fields up to a number are alternatives, and what those are called."""

_FIELDS: Final[dict[str, dict[str, tuple[int, str]]]] = {
    "HeaderValue": {"key": (1, "string"), "value": (2, "string"), "raw_value": (3, "bytes")},
    "HeaderMap": {"headers": (1, "repeated HeaderValue")},
    "HttpHeaders": {"headers": (1, "HeaderMap"), "end_of_stream": (3, "bool")},
    "HttpBody": {"body": (1, "bytes"), "end_of_stream": (2, "bool")},
    "HttpTrailers": {},
    "Metadata": {"filter_metadata": (1, _STRUCTS)},
    "ProtocolConfiguration": {"request_body_mode": (1, "int32"), "response_body_mode": (2, "int32")},
    "ProcessingRequest": {
        "request_headers": (2, "HttpHeaders"),
        "response_headers": (3, "HttpHeaders"),
        "request_body": (4, "HttpBody"),
        "response_body": (5, "HttpBody"),
        "request_trailers": (6, "HttpTrailers"),
        "response_trailers": (7, "HttpTrailers"),
        "metadata_context": (8, "Metadata"),
        "attributes": (9, _STRUCTS),
        "protocol_config": (11, "ProtocolConfiguration"),
    },
    "HeaderValueOption": {"header": (1, "HeaderValue"), "append_action": (3, "int32")},
    "HeaderMutation": {
        "set_headers": (1, "repeated HeaderValueOption"),
        "remove_headers": (2, "repeated string"),
    },
    "StreamedBodyResponse": {"body": (1, "bytes"), "end_of_stream": (2, "bool")},
    "BodyMutation": {"streamed_response": (3, "StreamedBodyResponse")},
    "CommonResponse": {"header_mutation": (2, "HeaderMutation"), "body_mutation": (3, "BodyMutation")},
    "HeadersResponse": {"response": (1, "CommonResponse")},
    "BodyResponse": {"response": (1, "CommonResponse")},
    "TrailersResponse": {},
    "HttpStatus": {"code": (1, "int32")},
    "ImmediateResponse": {
        "status": (1, "HttpStatus"),
        "headers": (2, "HeaderMutation"),
        "body": (3, "bytes"),
    },
    "ProcessingResponse": {
        "request_headers": (1, "HeadersResponse"),
        "response_headers": (2, "HeadersResponse"),
        "request_body": (3, "BodyResponse"),
        "response_body": (4, "BodyResponse"),
        "request_trailers": (5, "TrailersResponse"),
        "response_trailers": (6, "TrailersResponse"),
        "immediate_response": (7, "ImmediateResponse"),
        "dynamic_metadata": (8, "google.protobuf.Struct"),
    },
}
"""The fields of each message: number and type."""

_FieldType = descriptor_pb2.FieldDescriptorProto
_SCALARS: Final = {
    "bool": _FieldType.TYPE_BOOL,
    "bytes": _FieldType.TYPE_BYTES,
    "int32": _FieldType.TYPE_INT32,
    "string": _FieldType.TYPE_STRING,
}


def _add_field(message: Any, name: str, number: int, kind: str) -> None:
    field = message.field.add(name=name, number=number, label=_FieldType.LABEL_OPTIONAL)
    if kind == _STRUCTS:
        entry = message.nested_type.add(name=name.title().replace("_", "") + "Entry")
        entry.options.map_entry = True
        _add_field(entry, "key", 1, "string")
        _add_field(entry, "value", 2, "google.protobuf.Struct")
        kind = f"{_REPEATED}{message.name}.{entry.name}"
    if kind.startswith(_REPEATED):
        field.label, kind = _FieldType.LABEL_REPEATED, kind.removeprefix(_REPEATED)
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type = _FieldType.TYPE_MESSAGE
        field.type_name = f".{kind}" if kind.startswith("google.") else f".{_PACKAGE}.{kind}"


def _classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(
        name="headwater/ext_proc.proto", package=_PACKAGE, syntax="proto3"
    )
    file.dependency.append(struct_pb2.DESCRIPTOR.name)
    for name, fields in _FIELDS.items():
        message = file.message_type.add(name=name)
        if name in _ONEOFS:
            message.oneof_decl.add(name=_ONEOFS[name][0])
        for field, (number, kind) in fields.items():
            _add_field(message, field, number, kind)
            if name in _ONEOFS and number <= _ONEOFS[name][1]:
                message.field[-1].oneof_index = 0
    pool = descriptor_pool.Default()
    registered = pool.Add(file) or pool.FindFileByName(file.name)
    return {name: message_factory.GetMessageClass(registered.message_types_by_name[name]) for name in _FIELDS}


_made: Final = _classes()

ProcessingRequest: Any = _made["ProcessingRequest"]
ProcessingResponse: Any = _made["ProcessingResponse"]
HttpHeaders: Any = _made["HttpHeaders"]
HttpBody: Any = _made["HttpBody"]
HttpTrailers: Any = _made["HttpTrailers"]
HeaderValue: Any = _made["HeaderValue"]
HeaderValueOption: Any = _made["HeaderValueOption"]
HeaderMutation: Any = _made["HeaderMutation"]
CommonResponse: Any = _made["CommonResponse"]
HeadersResponse: Any = _made["HeadersResponse"]
BodyResponse: Any = _made["BodyResponse"]
BodyMutation: Any = _made["BodyMutation"]
StreamedBodyResponse: Any = _made["StreamedBodyResponse"]
TrailersResponse: Any = _made["TrailersResponse"]
ImmediateResponse: Any = _made["ImmediateResponse"]
HttpStatus: Any = _made["HttpStatus"]


def stub(channel: Any) -> Any:
    """The method, of a client's channel of gRPC."""
    return channel.stream_stream(
        f"/{SERVICE}/{METHOD}",
        request_serializer=ProcessingRequest.SerializeToString,
        response_deserializer=ProcessingResponse.FromString,
    )
