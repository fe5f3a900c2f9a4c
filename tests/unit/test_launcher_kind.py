"""How a study says where its processes run, which alters no trial."""

from __future__ import annotations

from pathlib import Path

import pytest

from workbench.errors import StudyError
from workbench.schema import study_schema
from workbench.spec import Study, read_study
from workbench.trials import config_digest, expand

STUDY = """\
schema: 1
name: small
question: Is it so?
defaults: [model/tiny, data/default]
arms: {spes: {method: spes}}
seeds: [0]
"""


def read(folder: Path, more: str = "", *overrides: str) -> Study:
    path = folder / "study.yaml"
    path.write_text(STUDY + more, encoding="utf-8")
    study = read_study(path, overrides)
    expand(study)  # raises for a study with mistakes
    return study


@pytest.mark.parametrize(
    ("more", "overrides"),
    [
        ("launcher: ssh\n", ()),
        ("launcher: {kind: ssh}\n", ()),
        ("launcher.kind: ssh\n", ()),
        ("launcher: local\n", ("launcher=ssh",)),
        ("launcher: {kind: local}\n", ("launcher=ssh",)),
        ("", ("launcher=ssh",)),
        ("", ("launcher.kind=ssh",)),
    ],
)
def test_every_way_to_say_ssh(tmp_path: Path, more: str, overrides: tuple[str, ...]) -> None:
    study = read(tmp_path, more, *overrides)
    assert (study.launcher.kind, study.launcher.inventory) == ("ssh", "hosts.yaml")
    local = read(tmp_path)
    assert [config_digest(one.config) for one in expand(study)] == [config_digest(one.config) for one in expand(local)]


def test_the_short_form_keeps_the_other_settings_of_what_is_extended(tmp_path: Path) -> None:
    (tmp_path / "below.yaml").write_text(STUDY + "launcher: {kind: local, threads: 3}\n", encoding="utf-8")
    above = tmp_path / "above.yaml"
    above.write_text("extends: below.yaml\nname: other\nquestion: And so?\nlauncher: ssh\n", encoding="utf-8")
    study = read_study(above)
    assert (study.launcher.kind, study.launcher.threads, study.mistakes) == ("ssh", 3, ())


def test_a_misspelt_kind_is_told_by_its_line(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match=r"study\.yaml:7: launcher\.kind \('sssh'\) must be one of local, ssh"):
        read(tmp_path, "launcher: sssh\n")


def test_the_schema_knows_the_short_form() -> None:
    options = study_schema()["properties"]["launcher"]["anyOf"]
    assert any("ssh" in option.get("enum", ()) for option in options)
