"""How many bytes a codec makes of a tensor, and how those are cut into chunks: arithmetic, no data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class WireFormat:
    """Size of a codec's output: ``block_elements`` values become ``block_bytes`` bytes, ``header_bytes`` of them first.

    A short last block is its header and its values. A chunk holds whole blocks, so that the receiver decodes each
    chunk on its own.
    """

    name: str
    block_elements: int
    block_bytes: int
    header_bytes: int = 0

    def encoded_bytes(self, num_elements: int) -> int:
        """Bytes on the wire of so many values, without framing."""
        blocks, rest = divmod(num_elements, self.block_elements)
        last = self.header_bytes + -(-rest * self._value_bytes // self.block_elements) if rest else 0
        return blocks * self.block_bytes + last

    def elements(self, encoded_bytes: int) -> int:
        """Values in so many bytes: of whole blocks exactly, of a short last one the most that it can hold."""
        blocks, rest = divmod(encoded_bytes, self.block_bytes)
        last = max(rest - self.header_bytes, 0) * self.block_elements // self._value_bytes
        return blocks * self.block_elements + last

    def chunks(self, encoded_bytes: int, chunk_bytes: int, start: int = 0) -> Iterator[tuple[int, int]]:
        """(offset, length) of each chunk of one encoded tensor, in bytes, from the block boundary ``start`` on."""
        whole = max(chunk_bytes // self.block_bytes, 1) * self.block_bytes
        for offset in range(start, encoded_bytes, whole):
            yield offset, min(whole, encoded_bytes - offset)

    @property
    def _value_bytes(self) -> int:
        """Bytes of a whole block's values."""
        return self.block_bytes - self.header_bytes


BLOCK_ELEMENTS = 128
"""Values that share a scale: 2 bytes of scale for 128 or 64 bytes of values."""

FORMATS = {
    wire.name: wire
    for wire in (
        WireFormat("float32", 1, 4),
        WireFormat("bfloat16", 1, 2),
        WireFormat("int8", BLOCK_ELEMENTS, 2 + BLOCK_ELEMENTS, 2),
        WireFormat("int4", BLOCK_ELEMENTS, 2 + BLOCK_ELEMENTS // 2, 2),
    )
}
"""Every wire format by the value of wire.dtype that asks for it."""
