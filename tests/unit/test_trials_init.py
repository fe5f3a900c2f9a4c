"""A study whose runs start from a weights file: the workbench takes its digest, and only its content is identity."""

from __future__ import annotations

from pathlib import Path

import pytest

from spes_core.filedigest import file_digest
from workbench.errors import StudyError
from workbench.spec import read_study
from workbench.trials import Trial, expand, identify

STUDY = """\
schema: 1
name: probe
question: What happens?
defaults: [model/tiny, data/default]
run: {nodes: 2, init: {kind: weights, weights: WEIGHTS}}
arms: {spes: {method: spes}}
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def trials(tmp_path: Path, weights: Path | str, *overrides: str) -> list[Trial]:
    path = tmp_path / "probe.yaml"
    path.write_text(STUDY.replace("WEIGHTS", str(weights)))
    study = read_study(path, overrides)
    return identify(study, expand(study), lambda corpus: "d1")


def mistake(tmp_path: Path, weights: Path | str, *overrides: str) -> str:
    with pytest.raises(StudyError) as caught:
        trials(tmp_path, weights, *overrides)
    (line,) = caught.value.mistakes
    return line.replace(str(tmp_path), "DIR")


def test_a_trial_holds_the_digest_and_the_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "w").write_bytes(b"one")
    monkeypatch.chdir(tmp_path)
    (trial,) = trials(tmp_path, "w")
    assert trial.config.init.weights == str(tmp_path / "w")
    assert trial.config.init.digest == file_digest(tmp_path / "w")


def test_the_id_follows_the_content_and_not_the_place(tmp_path: Path) -> None:
    for name, content in {"a": b"one", "b": b"one", "c": b"two"}.items():
        (tmp_path / name).write_bytes(content)
    (a,), (b,), (c,) = (trials(tmp_path, tmp_path / name) for name in "abc")
    assert a.id == b.id
    assert a.id != c.id
    (drawn,) = trials(tmp_path, tmp_path / "absent", "run.init.kind=random")
    assert drawn.id not in (a.id, c.id)


def test_files_can_be_an_axis(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).write_bytes(name.encode())
    axis = f"+sweep.grid.init.weights=[{tmp_path / 'a'},{tmp_path / 'b'}]"
    assert len({trial.id for trial in trials(tmp_path, tmp_path / "a", axis)}) == 2
    assert len(trials(tmp_path, tmp_path / "a", axis, "run.init.kind=random")) == 1


def test_a_missing_file_is_a_mistake_of_the_study_with_its_line(tmp_path: Path) -> None:
    assert mistake(tmp_path, tmp_path / "absent") == (
        "DIR/probe.yaml:5: run.init.weights cannot be used: DIR/absent cannot be read: No such file or directory"
    )


def test_a_digest_that_is_given_must_be_the_file_s(tmp_path: Path) -> None:
    (tmp_path / "w").write_bytes(b"one")
    override = f"+run.init.digest={'a' * 64}"
    assert mistake(tmp_path, tmp_path / "w", override).endswith(
        f"must be the SHA-256 of init.weights, which is {file_digest(tmp_path / 'w')}; correct it or leave it out"
    )


def test_a_file_that_only_the_hosts_of_the_run_have_is_known_by_its_digest(tmp_path: Path) -> None:
    (trial,) = trials(tmp_path, "/on/the/hosts", f"+run.init.digest={'a' * 64}")
    assert trial.config.init.digest == "a" * 64
