"""The decoder: embedding, layers of attention and experts, and the losses of next-token prediction.

Shape suffixes: B sequences, T positions, D d_model, L layers, E experts, N = B·T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear
from torch.utils.checkpoint import checkpoint

from spes_core.config import ComputeConfig, FrozenConfig, LossConfig, ModelConfig
from spes_core.model.attention import Attention, document_mask, rotation_tables
from spes_core.model.counting import tensor_shapes
from spes_core.model.losses import token_loss
from spes_core.model.moe import AllRanks, Experts, route
from spes_core.model.norm import rms_norm
from spes_core.names import parse_expert


class ModelOutput(NamedTuple):
    """Losses (0-dim, nats where it applies) and expert loads of one batch. Only ``loss`` is differentiable.

    A tuple, because FSDP looks for the tensors of an output inside tuples, not inside dataclasses.
    """

    loss: Tensor
    """cross_entropy + z_weight·z_loss + balance_weight·balance_loss + router_z_weight·router_z_loss."""
    cross_entropy: Tensor
    """Mean over the targets that are not ignored."""
    z_loss: Tensor
    """Mean over the targets of the squared log-partition of the output softmax."""
    balance_loss: Tensor
    """Mean over layers of E · Σ_e f_e·p_e / top_k (moe.Routing); 1 when routing is uniform."""
    router_z_loss: Tensor
    """Mean over layers and tokens of the squared log-partition of the router softmax."""
    expert_tokens_LE: Tensor
    """Tokens sent to each expert of each layer, int64."""


class Decoder(nn.Module):
    """A Mixture-of-Experts decoder that trains the experts in ``trained_experts`` and all shared tensors.

    Weights are fp32 (frozen experts in ``frozen.dtype``) and uninitialised (see `initialise`). Shared parameters carry
    their canonical names (spes_core.names); experts lie in stacked banks, `tensors` gives each its own name.
    """

    def __init__(
        self,
        config: ModelConfig,
        trained_experts: Sequence[int],
        *,
        compute: ComputeConfig | None = None,
        frozen: FrozenConfig | None = None,
    ) -> None:
        super().__init__()
        self.config, self.trained_experts = config, tuple(sorted(trained_experts))
        assert all(0 <= expert < config.num_experts for expert in self.trained_experts)
        compute, frozen = compute or ComputeConfig(), frozen or FrozenConfig()
        self._is_bfloat16 = compute.precision == "bfloat16"
        frozen_dtype = torch.bfloat16 if frozen.dtype == "bfloat16" else torch.float32
        self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.d_model))
        self.layers = nn.ModuleList(
            DecoderLayer(config, self.trained_experts, compute=compute, frozen_dtype=frozen_dtype)
            for _ in range(config.num_layers)
        )
        self.final_norm = nn.Parameter(torch.empty(config.d_model))
        if not config.tie_embeddings:
            self.unembedding = nn.Parameter(torch.empty(config.vocab_size, config.d_model))
        self._rotation: tuple[Tensor, Tensor] | None = None
        self.separator_id: int | None = None
        """Token that ends a document where attention must not leave one (data.document_attention); else None."""

    def forward(
        self, tokens_BT: Tensor, targets_BT: Tensor, loss: LossConfig, other_tokens_LE: Tensor | None = None
    ) -> ModelOutput:
        """Losses of predicting ``targets_BT`` (int64; −100 is ignored) at each position of ``tokens_BT`` (int64).

        ``other_tokens_LE`` (int64): tokens that other micro-batches of the step sent to each expert; the balance loss
        takes its shares over them too.
        """
        hidden_BTD, balance_L, router_z_L, expert_tokens_LE = self._run_layers(tokens_BT, other_tokens_LE)
        unembedding_VD = self.embedding if self.config.tie_embeddings else self.unembedding
        token = token_loss(hidden_BTD.flatten(0, 1), unembedding_VD, targets_BT.flatten(), loss.z_weight)
        balance_loss, router_z_loss = balance_L.mean(), router_z_L.mean()
        auxiliary = loss.balance_weight * balance_loss + loss.router_z_weight * router_z_loss
        return ModelOutput(
            loss=token.objective + auxiliary,
            cross_entropy=token.cross_entropy,
            z_loss=token.z_loss,
            balance_loss=balance_loss.detach(),
            router_z_loss=router_z_loss.detach(),
            expert_tokens_LE=expert_tokens_LE,
        )

    @torch.no_grad()
    def logits(self, tokens_BT: Tensor) -> Tensor:
        """Next-token logits (B, T, vocab_size), without gradients: for evaluation and tests; holds all of them."""
        return self.unembed(self.hidden(tokens_BT))

    @torch.no_grad()
    def hidden(self, tokens_BT: Tensor) -> Tensor:
        """Normalised hidden states (B, T, d_model), without gradients: what `unembed` takes, all or some positions."""
        return self._run_layers(tokens_BT)[0]

    @torch.no_grad()
    def unembed(self, hidden: Tensor) -> Tensor:
        """Next-token logits (..., vocab_size) of hidden states (..., d_model), without gradients."""
        unembedding_VD = self.embedding if self.config.tie_embeddings else self.unembedding
        return linear(hidden, unembedding_VD.to(hidden.dtype))

    def tensors(self) -> dict[str, Tensor]:
        """All tensors under their canonical names and in canonical order, as detached views.

        Copying into a view changes the model. Not for a sharded decoder.
        """
        tensors: dict[str, Tensor] = {}
        for name in tensor_shapes(self.config):
            if (parsed := parse_expert(name)) is None:
                tensors[name] = self.get_parameter(name).detach()
            else:
                layer, expert, matrix = parsed
                experts = self.get_submodule(f"layers.{layer}.experts")
                assert isinstance(experts, Experts)
                tensors[name] = experts.tensor(expert, matrix)
        return tensors

    def _run_layers(
        self, tokens_BT: Tensor, other_tokens_LE: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Normalised hidden states (B, T, D); per layer balance loss (L,), router z-loss (L,), expert tokens (L, E)."""
        x_BTD = embedding(tokens_BT, self.embedding)
        x_BTD = x_BTD.bfloat16() if self._is_bfloat16 else x_BTD
        rotation = self._rotation_for(tokens_BT.shape[1], x_BTD)
        # One mask for all layers: it costs as much as a layer's attention.
        mask_B1TT = None if self.separator_id is None else document_mask(tokens_BT, self.separator_id, x_BTD.dtype)
        statistics = []
        others = [None] * len(self.layers) if other_tokens_LE is None else other_tokens_LE.unbind(0)
        for layer, other_tokens_E in zip(self.layers, others, strict=True):
            x_BTD, *of_layer = layer(x_BTD, rotation, other_tokens_E, mask_B1TT)
            statistics.append(of_layer)
        balance, router_z, expert_tokens = (torch.stack(values) for values in zip(*statistics, strict=True))
        return rms_norm(x_BTD, self.final_norm, self.config.norm_eps), balance, router_z, expert_tokens

    def _rotation_for(self, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        tables = self._rotation
        if (
            tables is None
            or len(tables[0]) < length
            or (tables[0].device, tables[0].dtype) != (like.device, torch.promote_types(like.dtype, torch.float32))
        ):
            tables = self._rotation = rotation_tables(self.config, length, like)
        return tables


LayerOutput = tuple[Tensor, Tensor, Tensor, Tensor]
"""The new residual stream (B, T, D), the layer's balance loss, router z-loss and expert tokens (E,)."""


class DecoderLayer(nn.Module):
    """Attention and experts, each behind an RMSNorm and added to the residual stream.

    The unit of sharding, of activation checkpointing and of compilation.
    """

    def __init__(
        self,
        config: ModelConfig,
        trained_experts: Sequence[int],
        *,
        compute: ComputeConfig,
        frozen_dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.norm_eps, self.top_k, self.normalize_top_k = (
            config.norm_eps,
            config.top_k,
            config.normalize_top_k,
        )
        self.attention_norm = nn.Parameter(torch.empty(config.d_model))
        self.attention = Attention(config)
        self.moe_norm = nn.Parameter(torch.empty(config.d_model))
        self.router = nn.Parameter(torch.empty(config.num_experts, config.d_model))
        self.experts = Experts(config, trained_experts, compute=compute, frozen_dtype=frozen_dtype)
        self.all_ranks: AllRanks | None = None
        self._keeps_input_only = compute.activation_checkpointing == "block"
        self._train = torch.compile(self._compute) if compute.compile else self._compute

    def forward(
        self,
        x_BTD: Tensor,
        rotation: tuple[Tensor, Tensor],
        other_tokens_E: Tensor | None = None,
        mask_B1TT: Tensor | None = None,
    ) -> LayerOutput:
        """Both halves of the layer; ``other_tokens_E`` as in `moe.route`, ``mask_B1TT`` as in `Attention`."""
        if not torch.is_grad_enabled():
            return self._compute(x_BTD, rotation, other_tokens_E, mask_B1TT)
        if self._keeps_input_only:

            def run(x_BTD: Tensor, mask_B1TT: Tensor | None) -> LayerOutput:
                return self._train(x_BTD, rotation, other_tokens_E, mask_B1TT)

            # Arguments are what autograd keeps, and is measured by; nothing here draws random numbers.
            output: LayerOutput = checkpoint(run, x_BTD, mask_B1TT, use_reentrant=False, preserve_rng_state=False)
            return output
        return self._train(x_BTD, rotation, other_tokens_E, mask_B1TT)

    def _compute(
        self,
        x_BTD: Tensor,
        rotation: tuple[Tensor, Tensor],
        other_tokens_E: Tensor | None,
        mask_B1TT: Tensor | None = None,
    ) -> LayerOutput:
        x_BTD = x_BTD + self.attention(rms_norm(x_BTD, self.attention_norm, self.norm_eps), rotation, mask_B1TT)
        y_ND = rms_norm(x_BTD, self.moe_norm, self.norm_eps).flatten(0, 1)
        logits_NE = linear(y_ND, self.router.to(y_ND.dtype))
        routing = route(logits_NE, self.top_k, self.normalize_top_k, other_tokens_E, self.all_ranks)
        x_BTD = x_BTD + self.experts(y_ND, routing).view(x_BTD.shape)
        return x_BTD, routing.balance_loss, routing.router_z_loss, routing.expert_tokens_E
