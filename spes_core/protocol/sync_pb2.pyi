from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TensorSpec(_message.Message):
    __slots__ = ("name", "shape", "dtype")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    def __init__(self, name: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("protocol_version", "node", "num_nodes", "config_digest", "config_json", "schema_digest", "schema", "experts")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    NUM_NODES_FIELD_NUMBER: _ClassVar[int]
    CONFIG_DIGEST_FIELD_NUMBER: _ClassVar[int]
    CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    node: int
    num_nodes: int
    config_digest: str
    config_json: str
    schema_digest: str
    schema: _containers.RepeatedCompositeFieldContainer[TensorSpec]
    experts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, protocol_version: _Optional[int] = ..., node: _Optional[int] = ..., num_nodes: _Optional[int] = ..., config_digest: _Optional[str] = ..., config_json: _Optional[str] = ..., schema_digest: _Optional[str] = ..., schema: _Optional[_Iterable[_Union[TensorSpec, _Mapping]]] = ..., experts: _Optional[_Iterable[int]] = ...) -> None: ...

class JoinReply(_message.Message):
    __slots__ = ("session", "round", "digest")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    round: int
    digest: str
    def __init__(self, session: _Optional[bytes] = ..., round: _Optional[int] = ..., digest: _Optional[str] = ...) -> None: ...

class UploadManifest(_message.Message):
    __slots__ = ("node", "session", "round", "step", "tokens", "codec", "tensors")
    NODE_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    node: int
    session: bytes
    round: int
    step: int
    tokens: int
    codec: str
    tensors: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, node: _Optional[int] = ..., session: _Optional[bytes] = ..., round: _Optional[int] = ..., step: _Optional[int] = ..., tokens: _Optional[int] = ..., codec: _Optional[str] = ..., tensors: _Optional[_Iterable[int]] = ...) -> None: ...

class UploadReceipt(_message.Message):
    __slots__ = ("payload_bytes", "blocked_s", "aggregate_s", "close_s")
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCKED_S_FIELD_NUMBER: _ClassVar[int]
    AGGREGATE_S_FIELD_NUMBER: _ClassVar[int]
    CLOSE_S_FIELD_NUMBER: _ClassVar[int]
    payload_bytes: int
    blocked_s: float
    aggregate_s: float
    close_s: float
    def __init__(self, payload_bytes: _Optional[int] = ..., blocked_s: _Optional[float] = ..., aggregate_s: _Optional[float] = ..., close_s: _Optional[float] = ...) -> None: ...

class DownloadRequest(_message.Message):
    __slots__ = ("node", "session", "round")
    NODE_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    node: int
    session: bytes
    round: int
    def __init__(self, node: _Optional[int] = ..., session: _Optional[bytes] = ..., round: _Optional[int] = ...) -> None: ...

class DownloadManifest(_message.Message):
    __slots__ = ("round", "step", "tokens", "codec", "tensors", "merged", "aggregate_s", "merge_s", "digest")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    MERGED_FIELD_NUMBER: _ClassVar[int]
    AGGREGATE_S_FIELD_NUMBER: _ClassVar[int]
    MERGE_S_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    round: int
    step: int
    tokens: int
    codec: str
    tensors: _containers.RepeatedScalarFieldContainer[int]
    merged: bool
    aggregate_s: float
    merge_s: float
    digest: str
    def __init__(self, round: _Optional[int] = ..., step: _Optional[int] = ..., tokens: _Optional[int] = ..., codec: _Optional[str] = ..., tensors: _Optional[_Iterable[int]] = ..., merged: _Optional[bool] = ..., aggregate_s: _Optional[float] = ..., merge_s: _Optional[float] = ..., digest: _Optional[str] = ...) -> None: ...
