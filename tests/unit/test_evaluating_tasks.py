"""Tasks by name, their offline copies, and the files that are generated for the harness; without the harness itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

pytest.importorskip("lm_eval", reason="needs the evaluation extra")

from spes_core.errors import DataError
from tests.small_trials import write_rows, write_tasks
from workbench.evaluating_tasks import SUITE, expand, find_copy, mistakes, resolve, task_file
from workbench.settings import Evaluation


def test_the_suite_is_the_paper_s_with_its_shots() -> None:
    shots = {task.name: task.shots for task in resolve([SUITE])}
    zero = ("sciq", "piqa", "winogrande", "arc_easy", "social_iqa", "openbookqa", "boolq")
    assert shots == dict.fromkeys(zero, 0) | {"arc_challenge": 25, "hellaswag": 10}
    assert expand(["sciq", SUITE, "sciq"])[:2] == ["sciq", "piqa"]


def test_a_label_names_shots_only_where_they_are_not_the_task_s_own() -> None:
    assert [task.label for task in resolve(["gsm8k", "gsm8k:5", "gsm8k:3", "piqa:0"])] == ["gsm8k", "gsm8k:3", "piqa"]


def test_blimp_is_its_67_paradigms() -> None:
    (blimp,) = resolve(["blimp"])
    assert len(blimp.leaves) == 67 == len({leaf.label for leaf in blimp.leaves})
    assert {leaf.name for leaf in blimp.leaves} >= {"blimp_wh_island", "blimp_causative"}
    assert all(leaf.config["validation_split"] == "train" for leaf in blimp.leaves)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("arc_esay", "did you mean arc_easy"),
        ("blimp_wh_iland", "did you mean blimp_wh_island"),
        ("qqqqqq", "known here: spes_suite, arc_challenge"),
        ("mmlu", "name its tasks"),
        ("piqa@5", "NAME:SHOTS"),
        ("", "NAME:SHOTS"),
    ],
)
def test_a_wrong_name_gets_the_nearest(name: str, reason: str) -> None:
    ((index, said),) = mistakes(["sciq", name, SUITE, "lambada_openai", "mmlu_anatomy"])
    assert index == 1 and said.startswith(f"({name})") and reason in said and len(said) < 400


def test_wrong_settings_are_named_by_their_paths(tmp_path: Path) -> None:
    wrong = Evaluation(tasks=("sciq", "foo"), limit=1, batch_size=0, data_dir=str(tmp_path / "none"))
    paths = [problem.path for problem in wrong.problems()]
    assert paths == [f"evaluation.{name}" for name in ("batch_size", "limit", "tasks[1]")]
    assert [problem.path for problem in wrong.folder_problems()] == ["evaluation.data_dir"]
    assert not list(Evaluation().problems()) and list(Evaluation().problems(asked=True))


def test_a_copy_lists_the_splits_that_are_there(tmp_path: Path) -> None:
    data_dir = write_tasks(tmp_path)
    arc, hellaswag, paradigm = resolve(["arc_easy", "hellaswag:3", "blimp_causative"])
    write_rows(data_dir / "arc_easy" / "train.jsonl.gz", [{}])
    assert list(find_copy(arc, data_dir).files) == ["train", "test"]
    assert find_copy(hellaswag, data_dir).text == "hellaswag/validation_12.jsonl.gz"
    before = find_copy(paradigm, data_dir)
    assert before.text == "blimp/causative.jsonl.gz"
    write_rows(data_dir / "blimp" / "causative.jsonl.gz", [{}])
    assert find_copy(paradigm, data_dir).digest != before.digest


def test_a_task_without_a_copy_says_which_file_is_wanted(tmp_path: Path) -> None:
    (sciq,) = resolve(["sciq"])
    with pytest.raises(DataError, match=r"sciq holds no test\.jsonl\.gz or validation\.jsonl\.gz; without data_dir"):
        find_copy(sciq, tmp_path)


def test_a_task_file_names_local_files_and_no_split_that_is_not_there(tmp_path: Path) -> None:
    data_dir = write_tasks(tmp_path)
    hellaswag, arc, hub = resolve(["hellaswag:3", "arc_easy", "piqa:2"])
    content = yaml.safe_load(task_file(hellaswag, find_copy(hellaswag, data_dir)))
    assert content["dataset_path"] == "json" and content["num_fewshot"] == 3
    assert content["dataset_kwargs"]["data_files"] == {"validation": str(data_dir / "hellaswag/validation_12.jsonl.gz")}
    assert (content["training_split"], content["test_split"], content["fewshot_split"]) == (None, *["validation"] * 2)
    content = yaml.safe_load(task_file(arc, find_copy(arc, data_dir)))
    assert (content["training_split"], content["validation_split"], content["test_split"]) == (None, None, "test")
    assert "num_fewshot" not in content
    assert yaml.safe_load(task_file(hub, None)) == {"include": str(hub.file), "task": "piqa", "num_fewshot": 2}


def test_the_controller_s_side_loads_neither_torch_nor_the_harness() -> None:
    program = (
        "import sys\n"
        "from workbench import campaign, evaluate, evaluating\n"
        "from workbench.evaluating_tasks import resolve\n"
        "assert len(resolve(['spes_suite', 'blimp'])) == 10\n"
        "assert not {'torch', 'lm_eval', 'transformers', 'datasets'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2])
