"""The only user of lm_eval: the harness's view of a language model, and the running of one task with it.

Shape suffixes: B texts, T positions, D width of the states, N scored positions, V vocabulary.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.evaluator import evaluate
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor

from spes_core.errors import DataError
from workbench.evaluating_model import LanguageModel
from workbench.evaluating_tasks import Copy, Task, evaluated_split, task_file

MOST_NEW_TOKENS = 256
"""Longest generation where a task names none, as in the harness's own adapters."""
_ROWS = 512
"""Positions whose logits are held at a time."""
_SEED = 1234
"""Draws the examples in prompts: the harness's own default."""
_BOOTSTRAP = 1000
"""Resamples for the standard error of metrics that are no means."""

Span = tuple[list[int], int]
"""Token ids, and how many of the last of them are scored given all before."""


class DecoderLM(TemplateLM):  # type: ignore[misc]
    """A `LanguageModel` behind the harness's interface.

    Texts of similar length share a batch and are padded on their right, which no position sees, so that scores do not
    depend on the batch beyond rounding (1e-4 nats a request). Probabilities are taken in float32. As in the harness's
    own adapter, a request longer than the context loses its beginning; of a continuation that is longer by itself
    every token is still scored, window by window, where the harness would stop.
    """

    def __init__(self, model: LanguageModel, batch_size: int) -> None:
        super().__init__()
        self._model, self._batch_size = model, batch_size
        self._device = model.device
        self.truncated = 0
        """Requests that have lost a part of their context."""

    @property
    def eot_token_id(self) -> int:
        """Id of the end of a text, which also stands before one."""
        return self._model.tokens.end

    @property
    def max_length(self) -> int:
        """Positions of the context."""
        return self._model.context

    @property
    def tokenizer_name(self) -> str:
        """There are no chat templates to tell apart."""
        return ""

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Ids of a text."""
        return self._model.tokens.encode(string, add_special_tokens)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """(log-likelihood in nats, whether greedy decoding gives it) of each continuation; no bar is drawn."""
        scored: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=True)
        return scored

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """The same for requests (text, context ids, continuation ids). Raises DataError where one is empty."""
        spans, owners = [], []
        for index, (_, context, continuation) in enumerate(requests):
            if not context or not continuation:
                raise DataError(f"a request has {len(context)} tokens of context and {len(continuation)} to score")
            pieces = list(self._spans(context, continuation))
            spans += pieces
            owners += [index] * len(pieces)
        totals, greedy = [0.0] * len(requests), [True] * len(requests)
        for owner, (nats, is_greedy) in zip(owners, self.score(spans), strict=True):
            totals[owner] += nats
            greedy[owner] &= is_greedy
        return list(zip(totals, greedy, strict=True))

    def _spans(self, context: list[int], continuation: list[int]) -> Iterator[Span]:
        self.truncated += len(context) + len(continuation) > self.max_length + 1
        if len(continuation) <= self.max_length:
            yield (context + continuation)[-(self.max_length + 1) :], len(continuation)
        else:
            yield from self._windows(continuation, context[-1])

    def _windows(self, tokens: list[int], before: int) -> Iterator[Span]:
        """Every token scored once, in windows of at most the context."""
        for window in get_rolling_token_windows(tokens, before, self.max_length, 1):
            given, scored = make_disjoint_window(window)
            yield given + scored, len(scored)

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood in nats of whole texts, each after the end of another."""
        spans, owners = [], []
        for index, request in enumerate(requests):
            pieces = list(self._windows(self.tok_encode(request.args[0]), self.prefix_token_id))
            spans += pieces
            owners += [index] * len(pieces)
        totals = [0.0] * len(requests)
        for owner, (nats, _) in zip(owners, self.score(spans), strict=True):
            totals[owner] += nats
        return totals

    def score(self, spans: Sequence[Span]) -> list[tuple[float, bool]]:
        """(log-likelihood in nats, is greedy) of each span's end, in the order given; equal inputs are run once."""
        users: dict[tuple[int, ...], list[int]] = {}
        for index, (tokens, _) in enumerate(spans):
            users.setdefault(tuple(tokens[:-1]), []).append(index)
        inputs = sorted(users, key=lambda tokens: (-len(tokens), tokens))
        results: list[tuple[float, bool]] = [(0.0, True)] * len(spans)
        for first in range(0, len(inputs), self._batch_size):
            batch = inputs[first : first + self._batch_size]
            hidden_BTD = self._model.hidden(self._padded(batch))
            for row, inputs_T in enumerate(batch):
                for index in users[inputs_T]:
                    targets = spans[index][0][-spans[index][1] :]
                    first_scored = len(inputs_T) - len(targets)
                    results[index] = self._ends(hidden_BTD[row, first_scored : len(inputs_T)], targets)
        return results

    @torch.no_grad()
    def _ends(self, hidden_ND: Tensor, targets: list[int]) -> tuple[float, bool]:
        """Sum of the targets' log-probabilities, and whether each is the likeliest."""
        nats, is_greedy = 0.0, True
        for first in range(0, len(targets), _ROWS):
            target_N = torch.tensor(targets[first : first + _ROWS], device=hidden_ND.device)
            logits_NV = self._model.unembed(hidden_ND[first : first + _ROWS]).float()
            log_p_NV = logits_NV.log_softmax(-1)
            nats += float(log_p_NV.gather(1, target_N[:, None]).sum())
            is_greedy &= bool((log_p_NV.argmax(-1) == target_N).all())
        return nats, is_greedy

    def _padded(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Rows of ids as (B, T), padded on the right."""
        longest = max(len(row) for row in rows)
        padded = [[*row, *[self.eot_token_id] * (longest - len(row))] for row in rows]
        return torch.tensor(padded, dtype=torch.long, device=self._model.device)

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Greedy continuations, cut before the first stop sequence. Raises DataError for sampling."""
        texts: dict[int, str] = {}
        encoded = [(index, self.tok_encode(request.args[0]), request.args[1]) for index, request in enumerate(requests)]
        groups: dict[str, list[tuple[int, list[int], dict[str, Any]]]] = {}
        for item in sorted(encoded, key=lambda item: -len(item[1])):
            groups.setdefault(repr(item[2]), []).append(item)
        for group in groups.values():
            for first in range(0, len(group), self._batch_size):
                batch = group[first : first + self._batch_size]
                generated = self._generate([context for _, context, _ in batch], batch[0][2])
                texts |= dict(zip((index for index, _, _ in batch), generated, strict=True))
        return [texts[index] for index in range(len(requests))]

    def _generate(self, contexts: list[list[int]], settings: dict[str, Any]) -> list[str]:
        """One batch; without a cache of keys and values, so each token costs a pass over its whole text."""
        chosen = normalize_gen_kwargs(settings, MOST_NEW_TOKENS)
        if chosen.get("do_sample"):
            raise DataError("the task asks for sampling; only greedy generation is done")
        stops = handle_stop_sequences(chosen.get("until"), eos=self._model.tokens.end_text)
        room = self.max_length - chosen["max_gen_toks"]
        if room <= 0:
            raise DataError(
                f"the task generates {chosen['max_gen_toks']} tokens, which leaves no room in the context of "
                f"{self.max_length}"
            )
        self.truncated += sum(len(context) > room for context in contexts)
        rows = [context[-room:] for context in contexts]
        made: list[list[int]] = [[] for _ in rows]
        open_rows = list(range(len(rows)))
        for _ in range(chosen["max_gen_toks"]):
            inputs = [rows[index] + made[index] for index in open_rows]
            hidden_BTD = self._model.hidden(self._padded(inputs))
            last = torch.tensor([len(tokens) - 1 for tokens in inputs], device=self._model.device)
            logits_BV = self._model.unembed(hidden_BTD[torch.arange(len(inputs), device=last.device), last])
            for index, token in zip(open_rows, logits_BV.float().argmax(-1).tolist(), strict=True):
                made[index].append(token)
            open_rows = [index for index in open_rows if not self._has_ended(made[index], stops)]
            if not open_rows:
                break
        return [postprocess_generated_text(self._decode(tokens), stops, None) for tokens in made]

    def _has_ended(self, tokens: list[int], stops: list[str]) -> bool:
        text = self._decode(tokens)
        return tokens[-1] == self.eot_token_id or any(stop and stop in text for stop in stops)

    def _decode(self, tokens: list[int]) -> str:
        end = tokens.index(self.eot_token_id) if self.eot_token_id in tokens else len(tokens)
        return self._model.tokens.decode(tokens[:end])


def run_task(lm: Any, task: Task, copy: Copy | None, limit: int | None, scratch: Path) -> dict[str, Any]:
    """Run one task and return its entry for evaluation.json (without status and key).

    ``scratch`` is a folder for the task's file. Raises whatever the harness raises: data that cannot be had, and rows
    or prompts that it cannot use.
    """
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    folder = scratch / task.label
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "task.yaml").write_text(task_file(task, copy), encoding="utf-8")
    loaded = TaskManager(include_path=str(folder), include_defaults=False).load([task.name])
    harness_task: Any = loaded["tasks"][task.name]
    harness_task.set_fewshot_seed(_SEED)
    truncated = getattr(lm, "truncated", 0)
    output = evaluate(lm, loaded, limit=limit, bootstrap_iters=_BOOTSTRAP, log_samples=False)
    assert output is not None
    higher = output["higher_is_better"].get(task.name, {})
    return {
        "name": task.name,
        "shots": task.shots,
        "version": task.version,
        "headline": task.headline,
        "metrics": _metrics(output["results"][task.name], higher),
        "n": int(output["n-samples"][task.name]["effective"]),
        "limit": limit,
        "split": evaluated_split(task, copy),
        "chance": _chance(harness_task),
        "requests": len(harness_task.instances),
        "truncated": getattr(lm, "truncated", 0) - truncated,
        "context": lm.max_length,
        "source": "hub" if copy is None else copy.text,
        "lm_eval": version("lm_eval"),
    }


def go_offline() -> None:
    """From now on, take data of the hub from this machine's cache only: each try to reach it takes half a minute."""
    import datasets
    import huggingface_hub

    huggingface_hub.constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True


def _metrics(results: dict[str, Any], higher: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """By name ("acc", or "exact_match.flexible-extract" behind a filter): value, standard error, direction.

    What is not finite is left out. Raises DataError when nothing else is there.
    """
    metrics: dict[str, dict[str, Any]] = {}
    not_finite = []
    for key, value in results.items():
        name, comma, sieve = key.partition(",")
        if not comma or name.endswith("_stderr") or not isinstance(value, int | float):
            continue
        if not math.isfinite(value):
            not_finite.append(f"{name} {value}")
            continue
        error = results.get(f"{name}_stderr,{sieve}")
        is_number = isinstance(error, int | float) and math.isfinite(error)
        shown = name if sieve == "none" else f"{name}.{sieve}"
        metrics[shown] = {
            "value": float(value),
            "stderr": float(error) if is_number and error is not None else None,
            "higher_is_better": bool(higher.get(name, True)),
        }
    if not_finite and not metrics:
        raise DataError(f"its scores are not finite numbers ({', '.join(not_finite)}): the model's outputs overflow")
    return metrics


def _chance(task: Any) -> float | None:
    """Accuracy of guessing: mean over items of 1/choices; None where there is nothing to choose from."""
    if task.OUTPUT_TYPE != "multiple_choice":
        return None
    choices: dict[int, set[int]] = {}
    for instance in task.instances:
        choices.setdefault(instance.doc_id, set()).add(instance.idx)
    return math.fsum(1 / len(found) for found in choices.values()) / len(choices)
