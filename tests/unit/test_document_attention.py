"""Documents that share a sequence are, where attention is kept apart, as if each had a sequence of its own."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from spes_core.config import ComputeConfig, DataConfig, LossConfig, ModelConfig
from spes_core.model import counting
from spes_core.model.attention import document_mask
from spes_core.model.decoder import Decoder
from spes_core.model.initialise import initialise
from spes_core.model.losses import IGNORED_TARGET
from spes_core.train.validate import validate
from tests.equivalence.participants import CPU, tiny
from tests.unit.test_counting import saved_bytes
from tests.unit.test_model import VARIANTS

END = 7
"""The end of text; tokens of `packed` are 8 and above."""
TOKEN_LOSS = LossConfig(balance_weight=0.0, router_z_weight=0.0)
"""Losses of routing are over all tokens of a batch, so only the loss of tokens can be compared."""


def packed(lengths: list[list[int]]) -> Tensor:
    """Sequences (B, T + 1) with documents of these lengths; an end of text opens each but the first of a sequence."""
    generator = torch.Generator().manual_seed(2)
    rows = []
    for row in lengths:
        documents = [torch.randint(8, 50, (length,), generator=generator).tolist() for length in row]
        rows.append([token for document in documents for token in (*document, END)][:-1])
    return torch.tensor(rows)


WINDOW_BW = packed([[5, 1, 9, 6], [24], [0, 23], [2, 0, 0, 17, 1]])
"""Documents of one token, of none, and one that fills its sequence."""


def make(model: ModelConfig, separator_id: int | None, compute: ComputeConfig | None = None) -> Decoder:
    decoder = Decoder(model, [0, 2], compute=compute)
    initialise(decoder, 3)
    decoder.separator_id = separator_id
    return decoder


def documents(window_W: Tensor) -> list[Tensor]:
    """The tokens of a sequence cut before each end of text: what attention sees together."""
    cuts = [0, *(place for place in range(1, len(window_W)) if window_W[place] == END), len(window_W)]
    return [window_W[start:end] for start, end in pairwise(cuts) if end > start]


@pytest.mark.parametrize("model", VARIANTS)
def test_logits_are_those_of_each_document_alone(model: ModelConfig) -> None:
    decoder, alone = make(model, END), make(model, None)
    logits_BTV = decoder.logits(WINDOW_BW)
    for row, window_W in enumerate(WINDOW_BW):
        expected = torch.cat([alone.logits(document.unsqueeze(0))[0] for document in documents(window_W)])
        torch.testing.assert_close(logits_BTV[row], expected, rtol=1e-5, atol=1e-5)
    assert (logits_BTV - alone.logits(WINDOW_BW)).abs().max() > 0.01


@pytest.mark.parametrize("checkpointing", ["none", "selective", "block"])
def test_loss_and_gradients_are_those_of_each_document_alone(checkpointing: str) -> None:
    model, compute = VARIANTS[0], ComputeConfig(activation_checkpointing=checkpointing)  # type: ignore[arg-type]
    decoder, alone = make(model, END, compute), make(model, None)
    tokens_BT, targets_BT = WINDOW_BW[:, :-1], WINDOW_BW[:, 1:]
    loss = decoder(tokens_BT, targets_BT, TOKEN_LOSS).loss
    loss.backward()
    total = torch.zeros(())
    for window_W in WINDOW_BW:
        at = 0
        for document in documents(window_W[:-1]):
            targets = window_W[at + 1 : at + 1 + len(document)]
            output = alone(document.unsqueeze(0), targets.unsqueeze(0), TOKEN_LOSS).loss
            total = total + output * len(document) / targets_BT.numel()
            at += len(document)
    total.backward()
    torch.testing.assert_close(loss, total, rtol=1e-5, atol=1e-5)
    for (name, weight), expected in zip(decoder.named_parameters(), alone.parameters(), strict=True):
        if weight.requires_grad:
            torch.testing.assert_close(weight.grad, expected.grad, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: n + m)


def test_every_target_counts_also_the_first_of_a_document_which_its_end_of_text_predicts() -> None:
    decoder = make(VARIANTS[0], END)
    window_BW = packed([[5, 6]])
    only_first = torch.full_like(window_BW[:, 1:], IGNORED_TARGET)
    only_first[0, 5] = window_BW[0, 6]
    loss = decoder(window_BW[:, :-1], only_first, LossConfig()).cross_entropy
    logits_V = make(VARIANTS[0], None).logits(torch.tensor([[END]]))[0, 0]
    assert float(loss) == pytest.approx(float(-logits_V.log_softmax(0)[window_BW[0, 6]]), rel=1e-5)


def test_validation_keeps_documents_apart_as_training_does() -> None:
    decoder = make(VARIANTS[0], END)
    tokens_BT, targets_BT = WINDOW_BW[:, :-1], WINDOW_BW[:, 1:]
    sums = validate(decoder, [(tokens_BT, targets_BT, 5, "")], LossConfig(), CPU)[""]
    expected = decoder(tokens_BT, targets_BT, LossConfig()).cross_entropy
    assert sums.loss_sum_nats / sums.target_tokens == pytest.approx(float(expected), rel=1e-6)


def test_a_mask_shows_each_position_its_document_and_what_came_before() -> None:
    mask_B1TT = document_mask(torch.tensor([[9, 9, END, 8, END]]), END, torch.float32)
    seen = [[int(value == 0) for value in row] for row in mask_B1TT[0, 0].tolist()]
    assert seen == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 1]]


@pytest.mark.parametrize("checkpointing", ["none", "selective", "block"])
def test_the_mask_s_memory_is_predicted_to_the_byte(checkpointing: str) -> None:
    compute = ComputeConfig(activation_checkpointing=checkpointing)  # type: ignore[arg-type]
    model = replace(VARIANTS[0], vocab_size=300, num_experts=4)
    data = DataConfig(
        tokenizer_vocab_size=300, sequence_length=24, global_batch_sequences=8, document_attention="separate"
    )
    config = replace(tiny(), model=model, data=data, compute=compute)
    decoder, batch = make(model, END, compute), (WINDOW_BW[:, :-1], WINDOW_BW[:, 1:])
    assert batch[0].shape == (4, 23)
    config = replace(config, data=replace(data, sequence_length=23))
    assert counting.memory(config, 0).activations_bytes == saved_bytes(decoder, batch)
