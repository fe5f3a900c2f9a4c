"""Causal self-attention with rotary positions, optional QK-norm and grouped-query heads.

Shape suffixes: B sequences, T positions, D d_model, H query heads, G key/value heads, C width of a head, P = C/2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention

from spes_core.config import ModelConfig
from spes_core.model.norm import rms_norm


class Attention(nn.Module):
    """Projections, QK-norm, rotation, scaled dot-product attention, output projection."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim, self.qk_norm, self.norm_eps = config.resolved_head_dim, config.qk_norm, config.norm_eps
        query_width, kv_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.q = nn.Parameter(torch.empty(query_width, config.d_model))
        self.k = nn.Parameter(torch.empty(kv_width, config.d_model))
        self.v = nn.Parameter(torch.empty(kv_width, config.d_model))
        self.o = nn.Parameter(torch.empty(config.d_model, query_width))
        if self.qk_norm != "none":
            per_head = self.qk_norm == "per_head"
            self.q_norm = nn.Parameter(torch.empty(self.head_dim if per_head else query_width))
            self.k_norm = nn.Parameter(torch.empty(self.head_dim if per_head else kv_width))

    def forward(self, x_BTD: Tensor, rotation: tuple[Tensor, Tensor], mask_B1TT: Tensor | None = None) -> Tensor:
        """Attend; ``rotation`` comes from `rotation_tables` for at least T positions. Returns (B, T, D).

        ``mask_B1TT`` is added to the scores (`document_mask`); without it a position sees all before it and itself.
        """
        batch, length, _ = x_BTD.shape
        q_BTHC = linear(x_BTD, self.q.to(x_BTD.dtype)).view(batch, length, self.num_heads, self.head_dim)
        k_BTGC = linear(x_BTD, self.k.to(x_BTD.dtype)).view(batch, length, self.num_kv_heads, self.head_dim)
        v_BTGC = linear(x_BTD, self.v.to(x_BTD.dtype)).view(batch, length, self.num_kv_heads, self.head_dim)
        if self.qk_norm != "none":
            q_BTHC = self._normalise(q_BTHC, self.q_norm)
            k_BTGC = self._normalise(k_BTGC, self.k_norm)
        q_BTHC, k_BTGC = rotate(q_BTHC, rotation), rotate(k_BTGC, rotation)
        y_BHTC = scaled_dot_product_attention(
            q_BTHC.transpose(1, 2),
            k_BTGC.transpose(1, 2),
            v_BTGC.transpose(1, 2),
            attn_mask=mask_B1TT,
            is_causal=mask_B1TT is None,
            enable_gqa=self.num_kv_heads != self.num_heads,
        )
        return linear(y_BHTC.transpose(1, 2).reshape(batch, length, -1), self.o.to(x_BTD.dtype))

    def _normalise(self, x_BTHC: Tensor, weight: Tensor) -> Tensor:
        if self.qk_norm == "per_head":
            return rms_norm(x_BTHC, weight, self.norm_eps)
        return rms_norm(x_BTHC.flatten(2), weight, self.norm_eps).view(x_BTHC.shape)


def document_mask(tokens_BT: Tensor, end_of_text_id: int, dtype: torch.dtype) -> Tensor:
    """0 where a query (third dimension) may see a key (last one), −inf elsewhere; (B, 1, T, T) of ``dtype``.

    A position sees its own document and the end of text before it, which so opens the document that follows: it sees
    nothing but itself. Rotary positions are relative, so a document need not begin at 0.
    """
    document_BT = (tokens_BT == end_of_text_id).cumsum(1)
    length = tokens_BT.shape[1]
    is_seen_BTT = (document_BT.unsqueeze(2) == document_BT.unsqueeze(1)).tril_()
    mask_B1TT = torch.full((len(tokens_BT), 1, length, length), -torch.inf, dtype=dtype, device=tokens_BT.device)
    return mask_B1TT.masked_fill_(is_seen_BTT.unsqueeze(1), 0)


def rotation_tables(config: ModelConfig, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of position · theta^(−2i/C), both (T, H, P), on the device of ``like``, in its dtype or fp32.

    They are repeated over heads, since on CPU broadcasting over short rows costs more than reading a larger table.
    Angles are taken in fp32.
    """
    width, dtype = config.resolved_head_dim, torch.promote_types(like.dtype, torch.float32)
    frequency_P = config.rope_theta ** -(torch.arange(0, width, 2, device=like.device).float() / width)
    angle_TP = torch.outer(torch.arange(length, device=like.device).float(), frequency_P)
    shape = (length, config.num_heads, width // 2)
    return tuple(  # type: ignore[return-value]
        table_TP.to(dtype)[:, None].expand(shape).contiguous() for table_TP in (angle_TP.cos(), angle_TP.sin())
    )


def rotate(x_BTHC: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary position embedding (Su et al., arXiv 2104.09864); rotate-half: element i is paired with i + C/2."""
    _, length, heads, _ = x_BTHC.shape
    cos, sin = rotation
    if torch.compiler.is_compiling() or x_BTHC.dtype != cos.dtype:
        cos_THP, sin_THP = cos[:length, :heads], sin[:length, :heads]
        first, second = x_BTHC.chunk(2, -1)
        turned = torch.cat((first * cos_THP - second * sin_THP, second * cos_THP + first * sin_THP), -1)
        return turned.to(x_BTHC.dtype)
    output: Tensor = _Rotation.apply(x_BTHC, cos[:length, :heads], sin[:length, :heads])  # type: ignore[no-untyped-call]
    return output


class _Rotation(torch.autograd.Function):
    """Rotation of each pair; its backward is the rotation by the opposite angle, so no activation is kept."""

    @staticmethod
    def forward(ctx: Any, x_BTHC: Tensor, cos_THP: Tensor, sin_THP: Tensor) -> Tensor:
        ctx.tables = (cos_THP, sin_THP)
        return _rotate_pairs(x_BTHC, cos_THP, sin_THP, sign=1)

    @staticmethod
    def backward(ctx: Any, grad_BTHC: Tensor) -> tuple[Tensor, None, None]:
        cos_THP, sin_THP = ctx.tables
        return _rotate_pairs(grad_BTHC, cos_THP, sin_THP, sign=-1), None, None


def _rotate_pairs(x_BTHC: Tensor, cos_THP: Tensor, sin_THP: Tensor, sign: int) -> Tensor:
    output = torch.empty(x_BTHC.shape, dtype=x_BTHC.dtype, device=x_BTHC.device)
    first, second = x_BTHC.chunk(2, -1)
    first_out, second_out = output.chunk(2, -1)
    torch.mul(first, cos_THP, out=first_out).addcmul_(second, sin_THP, value=-sign)
    torch.mul(second, cos_THP, out=second_out).addcmul_(first, sin_THP, value=sign)
    return output
