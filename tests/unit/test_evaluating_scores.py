"""The arithmetic of scores: groups, nodes, what is kept, and how a result takes them in."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="needs the evaluation extra")

from tests.small_trials import write_tasks
from workbench.durable import write_json
from workbench.evaluating_scores import FILE, ScoreBook, group_entry, over_nodes, read_scores, with_scores
from workbench.evaluating_tasks import resolve
from workbench.metrics import is_metric
from workbench.settings import Evaluation


def entry(value: float, stderr: float | None, n: int = 10, chance: float | None = 0.5) -> dict[str, Any]:
    return {
        "status": "done", "metrics": {"acc": {"value": value, "stderr": stderr, "higher_is_better": True}}, "n": n,
        "limit": None, "split": "train", "chance": chance, "requests": 2 * n, "truncated": 1, "context": 48,
        "source": "hub", "lm_eval": "0", "dtype": "float32",
    }  # fmt: skip


def test_the_error_of_a_group_is_that_of_a_mean_over_all_its_items() -> None:
    (blimp,) = resolve(["blimp"])
    rng = random.Random(0)
    answers = {leaf.label: [float(rng.random() < 0.6) for _ in range(40)] for leaf in blimp.leaves}
    entries = {}
    for label, items in answers.items():
        share = sum(items) / len(items)
        spread = math.sqrt(sum((item - share) ** 2 for item in items) / (len(items) - 1) / len(items))
        entries[label] = entry(share, spread, n=40)
    group = group_entry(blimp, entries)
    everything = [item for items in answers.values() for item in items]
    assert group["metrics"]["acc"]["value"] == pytest.approx(sum(everything) / len(everything))
    expected = math.sqrt(sum(part["metrics"]["acc"]["stderr"] ** 2 for part in entries.values())) / 67
    assert group["metrics"]["acc"]["stderr"] == pytest.approx(expected)
    assert (group["n"], group["chance"], group["truncated"]) == (67 * 40, pytest.approx(0.5), 67)


def test_a_group_with_a_missing_part_is_missing_and_says_which() -> None:
    (blimp,) = resolve(["blimp"])
    entries = {leaf.label: entry(0.5, 0.1) for leaf in blimp.leaves}
    entries["blimp_causative"] = {"status": "missing", "name": "blimp_causative", "reason": "gone"}
    group = group_entry(blimp, entries)
    assert group["status"] == "missing" and group["reason"] == "1 of 67 parts are missing; blimp_causative: gone"


def test_nodes_that_never_exchanged_count_by_their_mean() -> None:
    both = over_nodes([entry(0.2, 0.1), entry(0.4, 0.3)])
    assert both["metrics"]["acc"]["value"] == pytest.approx(0.3) and both["metrics"]["acc"]["stderr"] == 0.2
    assert [node["acc"]["value"] for node in both["nodes"]] == [0.2, 0.4]
    assert over_nodes([entry(0.2, 0.1), {"status": "missing", "reason": "gone"}])["reason"] == "gone"


def test_scores_are_kept_exactly_as_long_as_nothing_that_decides_them_changes(tmp_path: Path) -> None:
    data_dir = write_tasks(tmp_path / "data")
    tasks = resolve(["arc_easy", "blimp_causative", "piqa"])
    settings = Evaluation(data_dir=str(data_dir))
    book = ScoreBook(tmp_path, FILE, {"final.safetensors": "a"})
    assert [task.label for task in book.lacking(tasks, settings, again=False)] == [
        "arc_easy",
        "blimp_causative",
        "piqa",
    ]
    book.add(tasks[0], settings, entry(0.3, 0.1))
    book.add(tasks[1], settings, entry(0.6, None))
    book.add(tasks[2], settings, {"status": "missing", "reason": "no\n copy " + "x" * 1000})
    book.show(tasks)
    book.store(into_result=False)

    def lacking(
        settings: Evaluation, weights: str = "a", specs: tuple[str, ...] = (), *, again: bool = False
    ) -> list[str]:
        book = ScoreBook(tmp_path, FILE, {"final.safetensors": weights})
        wanted = resolve(specs) if specs else tasks
        return [task.label for task in book.lacking(wanted, settings, again=again)]

    everything = [task.label for task in tasks]
    assert lacking(settings) == []
    assert lacking(settings, again=True) == ["piqa"]
    assert lacking(Evaluation(data_dir=str(data_dir), batch_size=3)) == []
    assert lacking(settings, specs=("arc_easy", "arc_easy:3")) == ["arc_easy:3"]
    assert lacking(Evaluation(data_dir=str(data_dir), limit=5)) == everything
    assert lacking(Evaluation(data_dir=str(data_dir), dtype="bfloat16")) == everything
    assert lacking(Evaluation()) == everything
    assert lacking(settings, weights="b") == everything
    (data_dir / "arc_easy" / "test.jsonl.gz").write_bytes(b"other")
    assert lacking(settings) == ["arc_easy"]
    stored = json.loads((tmp_path / FILE).read_text())
    assert len(stored["tasks"]["piqa"]["reason"]) <= 400 and "\n" not in stored["tasks"]["piqa"]["reason"]


@pytest.mark.parametrize("hand", ["nan", "text", "number", "no metrics", "no tasks", "no list", "no weights"])
def test_what_a_hand_has_torn_counts_as_not_scored(tmp_path: Path, hand: str) -> None:
    tasks = resolve(["arc_easy", "piqa"])
    book = ScoreBook(tmp_path, FILE, {"final.safetensors": "a"})
    for task in tasks:
        book.add(task, Evaluation(), entry(0.3, 0.1))
    book.show(tasks)
    book.store(into_result=False)
    content = json.loads((tmp_path / FILE).read_text())
    scored = content["tasks"]
    {
        "nan": lambda: scored["arc_easy"]["metrics"]["acc"].update(value=math.nan),
        "text": lambda: scored["arc_easy"]["metrics"]["acc"].update(stderr="x"),
        "number": lambda: scored.update(arc_easy=3),
        "no metrics": lambda: scored["arc_easy"].pop("metrics"),
        "no tasks": lambda: content.update(tasks=[1]),
        "no list": lambda: content.update(shown=5),
        "no weights": lambda: content.pop("weights"),
    }[hand]()
    (tmp_path / FILE).write_text(json.dumps(content))
    torn = [
        task.label for task in tasks if (hand.startswith("no ") and hand != "no metrics") or task.label == "arc_easy"
    ]
    book = ScoreBook(tmp_path, FILE, {"final.safetensors": "a"})
    assert [task.label for task in book.lacking(tasks, Evaluation(), again=False)] == torn
    shown = with_scores({"metrics": {}}, read_scores(tmp_path / FILE)).get("evaluation", {"tasks": {}})["tasks"]
    assert set(shown) == {task.label for task in tasks} - set(torn)


def test_a_result_takes_scores_in_once_and_lets_them_go_again(tmp_path: Path) -> None:
    tasks = resolve(["arc_easy", "piqa", "hellaswag:3"])
    bare = {"status": "done", "metrics": {"eval/loss": 2.5}, "curves": {}}
    write_json(tmp_path / "result.json", bare)
    book = ScoreBook(tmp_path, FILE, {"final.safetensors": "a"})
    book.add(tasks[0], Evaluation(), entry(0.3, 0.1))
    book.add(tasks[1], Evaluation(), {"status": "missing", "reason": "gone"})
    book.add(tasks[2], Evaluation(), entry(0.25, None))
    book.show(tasks)
    book.store(into_result=True)
    result = json.loads((tmp_path / "result.json").read_text())
    scores = {"lm_eval/arc_easy/acc": 0.3, "lm_eval/arc_easy/acc_stderr": 0.1, "lm_eval/hellaswag:3/acc": 0.25}
    assert result["metrics"] == {"eval/loss": 2.5, **scores}
    assert all(is_metric(name) for name in scores) and not is_metric("lm_eval/arc_easy") and not is_metric("x/y/z")
    assert result["evaluation"]["tasks"]["piqa"]["reason"] == "gone"
    assert list(result)[-1] == "evaluation"
    content = json.loads((tmp_path / FILE).read_text())
    assert with_scores(result, content) == result == with_scores(bare, content)
    assert with_scores(result, {}) == bare
    before = (tmp_path / "result.json").stat().st_mtime_ns, (tmp_path / FILE).stat().st_mtime_ns
    ScoreBook(tmp_path, FILE, {"final.safetensors": "a"}).store(into_result=True)
    assert before == ((tmp_path / "result.json").stat().st_mtime_ns, (tmp_path / FILE).stat().st_mtime_ns)
