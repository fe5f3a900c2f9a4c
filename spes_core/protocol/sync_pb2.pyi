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
    __slots__ = ("protocol_version", "node", "num_nodes", "config_digest", "config_json", "schema_digest", "schema", "experts", "round", "token")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    NUM_NODES_FIELD_NUMBER: _ClassVar[int]
    CONFIG_DIGEST_FIELD_NUMBER: _ClassVar[int]
    CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    node: int
    num_nodes: int
    config_digest: str
    config_json: str
    schema_digest: str
    schema: _containers.RepeatedCompositeFieldContainer[TensorSpec]
    experts: _containers.RepeatedScalarFieldContainer[int]
    round: int
    token: str
    def __init__(self, protocol_version: _Optional[int] = ..., node: _Optional[int] = ..., num_nodes: _Optional[int] = ..., config_digest: _Optional[str] = ..., config_json: _Optional[str] = ..., schema_digest: _Optional[str] = ..., schema: _Optional[_Iterable[_Union[TensorSpec, _Mapping]]] = ..., experts: _Optional[_Iterable[int]] = ..., round: _Optional[int] = ..., token: _Optional[str] = ...) -> None: ...

class JoinReply(_message.Message):
    __slots__ = ("session", "round", "digest", "experts")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    round: int
    digest: str
    experts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, session: _Optional[bytes] = ..., round: _Optional[int] = ..., digest: _Optional[str] = ..., experts: _Optional[_Iterable[int]] = ...) -> None: ...

class UploadManifest(_message.Message):
    __slots__ = ("node", "session", "round", "step", "tokens", "codec", "tensors", "safe_round")
    NODE_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    SAFE_ROUND_FIELD_NUMBER: _ClassVar[int]
    node: int
    session: bytes
    round: int
    step: int
    tokens: int
    codec: str
    tensors: _containers.RepeatedScalarFieldContainer[int]
    safe_round: int
    def __init__(self, node: _Optional[int] = ..., session: _Optional[bytes] = ..., round: _Optional[int] = ..., step: _Optional[int] = ..., tokens: _Optional[int] = ..., codec: _Optional[str] = ..., tensors: _Optional[_Iterable[int]] = ..., safe_round: _Optional[int] = ...) -> None: ...

class UploadReady(_message.Message):
    __slots__ = ("offset_bytes", "prefix_digest", "is_complete")
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    PREFIX_DIGEST_FIELD_NUMBER: _ClassVar[int]
    IS_COMPLETE_FIELD_NUMBER: _ClassVar[int]
    offset_bytes: int
    prefix_digest: str
    is_complete: bool
    def __init__(self, offset_bytes: _Optional[int] = ..., prefix_digest: _Optional[str] = ..., is_complete: _Optional[bool] = ...) -> None: ...

class UploadReceipt(_message.Message):
    __slots__ = ("payload_bytes", "store_s")
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    STORE_S_FIELD_NUMBER: _ClassVar[int]
    payload_bytes: int
    store_s: float
    def __init__(self, payload_bytes: _Optional[int] = ..., store_s: _Optional[float] = ...) -> None: ...

class DownloadRequest(_message.Message):
    __slots__ = ("node", "session", "round", "is_snapshot", "offset_bytes")
    NODE_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    IS_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    node: int
    session: bytes
    round: int
    is_snapshot: bool
    offset_bytes: int
    def __init__(self, node: _Optional[int] = ..., session: _Optional[bytes] = ..., round: _Optional[int] = ..., is_snapshot: _Optional[bool] = ..., offset_bytes: _Optional[int] = ...) -> None: ...

class DownloadManifest(_message.Message):
    __slots__ = ("round", "step", "codec", "tensors", "merged", "experts")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    MERGED_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    round: int
    step: int
    codec: str
    tensors: _containers.RepeatedScalarFieldContainer[int]
    merged: bool
    experts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, round: _Optional[int] = ..., step: _Optional[int] = ..., codec: _Optional[str] = ..., tensors: _Optional[_Iterable[int]] = ..., merged: _Optional[bool] = ..., experts: _Optional[_Iterable[int]] = ...) -> None: ...

class RoundSummary(_message.Message):
    __slots__ = ("round", "tokens", "nodes", "experts", "aggregate_s", "merge_s", "wait_s", "digest")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    AGGREGATE_S_FIELD_NUMBER: _ClassVar[int]
    MERGE_S_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    round: int
    tokens: int
    nodes: _containers.RepeatedScalarFieldContainer[int]
    experts: _containers.RepeatedScalarFieldContainer[int]
    aggregate_s: float
    merge_s: float
    wait_s: float
    digest: str
    def __init__(self, round: _Optional[int] = ..., tokens: _Optional[int] = ..., nodes: _Optional[_Iterable[int]] = ..., experts: _Optional[_Iterable[int]] = ..., aggregate_s: _Optional[float] = ..., merge_s: _Optional[float] = ..., wait_s: _Optional[float] = ..., digest: _Optional[str] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("node", "session", "step")
    NODE_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    node: int
    session: bytes
    step: int
    def __init__(self, node: _Optional[int] = ..., session: _Optional[bytes] = ..., step: _Optional[int] = ...) -> None: ...

class HeartbeatReply(_message.Message):
    __slots__ = ("round",)
    ROUND_FIELD_NUMBER: _ClassVar[int]
    round: int
    def __init__(self, round: _Optional[int] = ...) -> None: ...
