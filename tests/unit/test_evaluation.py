"""Our adapter gives lm-eval what its own Hugging Face adapter gives for the exported model, request by request."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("lm_eval", reason="needs the evaluation extra")

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from torch import Tensor

from spes_core.errors import DataError
from tests.small_trials import CONTEXT, prepare_corpus, sentence, write_tasks, write_trial
from workbench.evaluating_model import LanguageModel, Tokens, exported_model, trial_model
from workbench.evaluating_tasks import find_copy, resolve
from workbench.evaluation import DecoderLM, run_task

pytestmark = pytest.mark.xdist_group("lm_eval")


class Models(SimpleNamespace):
    """The same weights behind three adapters: ours on our decoder, ours on the export, the harness's on the export."""

    own: DecoderLM
    exported: DecoderLM
    harness: Any
    model: LanguageModel


@pytest.fixture(scope="module", autouse=True)
def dataset_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What the datasets library keeps of rows that it has read goes to a folder of this test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("datasets")))
        yield


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("models")
    trial = write_trial(folder / "trial", prepare_corpus(folder))
    weights = trial / "weights" / "final.safetensors"
    own = trial_model(trial, weights, "cpu", "float32")
    exported = exported_model(trial, weights, folder / "export", "cpu", "float32")
    harness = HFLM(pretrained=str(folder / "export"), device="cpu", batch_size=5, dtype="float32")
    return Models(own=DecoderLM(own, 5), exported=DecoderLM(exported, 3), harness=harness, model=own)


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tasks(tmp_path_factory.mktemp("eval"))


def requests(kind: str, arguments: Sequence[tuple[Any, ...]]) -> list[Instance]:
    return [Instance(request_type=kind, doc={}, arguments=args, idx=0) for args in arguments]


def pairs() -> list[tuple[str, str]]:
    """Contexts from nothing to far beyond the model's, continuations of one token and of many, equal contexts."""
    rng = random.Random(5)
    texts = ["", "the", "ends in a space ", "<|endoftext|> as text", *(sentence(rng, 1, 90) for _ in range(12))]
    return [(text, f" {ending}") for text in texts for ending in ("x", sentence(rng), "naïve 日本")]


def assert_same(found: Sequence[tuple[float, bool]], expected: Sequence[tuple[float, bool]]) -> None:
    assert [nats for nats, _ in found] == pytest.approx([nats for nats, _ in expected], abs=1e-4)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]


def test_log_likelihoods_equal_the_harness_s_own_adapter(models: Models) -> None:
    asked = requests("loglikelihood", pairs())
    expected = models.harness.loglikelihood(asked, disable_tqdm=True)
    own = models.own.loglikelihood(asked)
    assert_same(own, expected)
    assert_same(models.exported.loglikelihood(asked), expected)
    assert models.own.truncated > 0, "no context was too long, so cutting was not tested"
    assert len({round(nats, 3) for nats, _ in own}) > 30, "scores hardly differ, so their order was not tested"


def test_rolling_log_likelihoods_equal_the_harness_s_own_adapter(models: Models) -> None:
    rng = random.Random(6)
    asked = requests("loglikelihood_rolling", [(sentence(rng, 1, 120),) for _ in range(6)])
    expected = models.harness.loglikelihood_rolling(asked, disable_tqdm=True)
    assert models.own.loglikelihood_rolling(asked) == pytest.approx(expected, abs=1e-4)


def test_greedy_texts_equal_the_harness_s_own_adapter(models: Models) -> None:
    rng = random.Random(7)
    first = {"until": ["e"], "max_gen_toks": 12, "do_sample": False}
    second = {"until": ["\n\n"], "max_gen_toks": 7}
    arguments = [(sentence(rng, 1, 40), first if n % 2 else second) for n in range(8)]
    expected = models.harness.generate_until(requests("generate_until", arguments), disable_tqdm=True)
    assert models.own.generate_until(requests("generate_until", arguments)) == expected
    assert len(set(expected)) > 2


def test_sampling_and_texts_longer_than_the_context_are_refused(models: Models) -> None:
    for settings, reason in (({"do_sample": True, "temperature": 1.0}, "sampling"), ({}, "leaves no room")):
        with pytest.raises(DataError, match=reason):
            models.own.generate_until(requests("generate_until", [("the", {"until": ["."], **settings})]))


def test_scores_do_not_depend_on_the_batch(models: Models) -> None:
    asked = requests("loglikelihood", pairs())
    alone = DecoderLM(models.model, 1).loglikelihood(asked)
    assert_same(DecoderLM(models.model, 64).loglikelihood(asked), alone)
    assert_same(DecoderLM(models.model, 7).loglikelihood(asked[::-1])[::-1], alone)


def test_every_token_of_a_continuation_longer_than_the_context_is_scored(models: Models) -> None:
    words = " ".join(["seven"] * 80)
    ids = models.own.tok_encode(f" {words}")
    assert len(ids) > CONTEXT
    ((found, _),) = models.own.loglikelihood(requests("loglikelihood", [("the", f" {words}")]))
    before, expected = models.own.tok_encode("the")[-1:], 0.0
    for start in range(0, len(ids), CONTEXT):
        piece = ids[start : start + CONTEXT]
        given = (before + ids[: start + len(piece)])[-(CONTEXT + 1) :]
        log_p = models.model.unembed(models.model.hidden(torch.tensor([given[:-1]])))[0].double().log_softmax(-1)
        places = range(len(given) - 1 - len(piece), len(given) - 1)
        expected += sum(float(log_p[place, token]) for place, token in zip(places, piece, strict=True))
    assert found == pytest.approx(expected, abs=1e-3)


def test_probabilities_of_a_bfloat16_model_are_float32() -> None:
    logits_V = torch.randn(5000, generator=torch.Generator().manual_seed(0)).bfloat16()

    def hidden(tokens_BT: Tensor) -> Tensor:
        return torch.zeros(*tokens_BT.shape, 1)

    tokens = Tokens(encode=lambda text, _: [len(text)], decode=str, end=0, end_text="")
    model = LanguageModel(
        hidden=hidden, unembed=lambda h: logits_V.expand(len(h), -1), tokens=tokens, context=8,
        device=torch.device("cpu"),
    )  # fmt: skip
    ((found, _),) = DecoderLM(model, 2).score([([0, 7], 1)])
    assert found == pytest.approx(float(logits_V.double().log_softmax(-1)[7]), abs=1e-5)


def test_the_three_adapters_agree_on_accuracies_and_errors_follow_from_them(
    models: Models, data_dir: Path, tmp_path: Path
) -> None:
    for name in ("arc_easy:2", "blimp_wh_island", "hellaswag:3"):
        (task,) = resolve([name])
        copy = find_copy(task, data_dir)
        adapters = (models.own, models.exported, models.harness)
        entries = [run_task(lm, task, copy, 11, tmp_path / str(n)) for n, lm in enumerate(adapters)]
        assert entries[0]["metrics"] == entries[1]["metrics"] == entries[2]["metrics"]
        share, error = (entries[0]["metrics"]["acc"][key] for key in ("value", "stderr"))
        assert error == pytest.approx(math.sqrt(share * (1 - share) / (11 - 1)))
        assert (entries[0]["n"], entries[0]["shots"], entries[0]["limit"]) == (11, task.shots, 11)
        assert entries[0]["chance"] == pytest.approx(1 / 3 if name.startswith("arc") else 1 / 2)


def test_examples_in_the_prompt_never_hold_the_item_itself(data_dir: Path, tmp_path: Path) -> None:
    prompts: list[str] = []

    class Reader:
        rank, world_size, max_length = 0, 1, 9

        def loglikelihood(self, asked: list[Instance]) -> list[tuple[float, bool]]:
            prompts.extend(instance.args[0] for instance in asked)
            return [(0.0, False)] * len(asked)

    (task,) = resolve(["hellaswag:5"])
    entry = run_task(Reader(), task, find_copy(task, data_dir), None, tmp_path)
    assert entry["split"] == "validation" and len(prompts) == 24
    for prompt in prompts:
        *examples, item = prompt.split("\n\n")
        assert len(examples) == 5
        assert not any(example.startswith(item) for example in examples), prompt


def test_real_tasks_agree_with_the_harness_s_own_adapter(models: Models, shared_data: Path, tmp_path: Path) -> None:
    """Texts beyond the context, an example in the prompt, contexts that differ between choices, and sentences alone."""
    for name in ("sciq", "boolq:1", "winogrande", "blimp_causative"):
        (task,) = resolve([name])
        copy = find_copy(task, shared_data / "eval")
        own = run_task(models.own, task, copy, 5, tmp_path / "own")
        harness = run_task(models.harness, task, copy, 5, tmp_path / "harness")
        assert own["metrics"] == harness["metrics"]
