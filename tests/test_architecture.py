"""Layer rules: each layer is imported in a fresh interpreter in which what it must not know cannot be imported."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
THIRD_PARTY = (
    "torch",
    "grpc",
    "google",
    "numpy",
    "mlflow",
    "optuna",
    "hydra",
    "omegaconf",
    "pandas",
    "matplotlib",
)
EDGES = ("spes_core.node", "spes_core.server", "workbench")
TRAINING = ("spes_core.train", "spes_core.data", "spes_core.hf")

# layer -> (its modules, the packages that it must work without)
LAYERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "configuration": (
        (
            "errors",
            "structure",
            "config",
            "dataconfig",
            "runfile",
            "torchrun",
            "names",
            "partition",
            "sharding",
            "rules",
            "mixrules",
            "schedules",
            "wireformat",
            "events",
            "filedigest",
            "link",
            "processlife",
            "address",
            "snapshots",
            "weightsfile",
        ),
        (*THIRD_PARTY, *EDGES, *TRAINING, "spes_core.model", "spes_core.sync", "spes_core.protocol"),
    ),
    "counting": (
        ("model.counting",),
        (*THIRD_PARTY, *EDGES, *TRAINING, "spes_core.sync", "spes_core.protocol"),
    ),
    "data order": (("data.order", "data.mixture", "data.shards"), ("torch", "grpc", "tokenizers", *EDGES)),
    "sync": (
        ("sync.*",),
        ("grpc", "google", "mlflow", *EDGES, *TRAINING, "spes_core.model", "spes_core.protocol"),
    ),
    "protocol": (("protocol.*",), ("torch", "mlflow", *EDGES, *TRAINING, "spes_core.model")),
    "model": (("model.*",), ("grpc", "mlflow", *EDGES, *TRAINING, "spes_core.sync", "spes_core.protocol")),
    "training": (
        ("train.*", "data.*", "hf.*", "checkpoint", "initial"),
        ("mlflow", "optuna", "hydra", "pandas", "matplotlib", *EDGES),
    ),
    "engine edges": (
        ("node", "server", "invitation", "participant"),
        ("mlflow", "optuna", "hydra", "pandas", "matplotlib", "workbench"),
    ),
}

BLOCKER = """
import importlib.abc, sys
blocked = {blocked!r}
class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if any(name == item or name.startswith(item + ".") for item in blocked):
            raise ImportError(f"layer rule: {{name}} must not be imported here")
        return None
sys.meta_path.insert(0, Block())
import importlib
for module in {modules!r}:
    importlib.import_module(module)
"""


def modules_of(patterns: tuple[str, ...]) -> list[str]:
    found = []
    for pattern in patterns:
        path = pattern.replace(".", "/")
        files = sorted(ROOT.glob(f"spes_core/{path}.py"))
        assert files, f"no module matches {pattern}"
        found += [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files]
    return [name.removesuffix(".__init__") for name in found]


@pytest.mark.parametrize("layer", LAYERS)
def test_layer_imports_nothing_from_above(layer: str) -> None:
    patterns, blocked = LAYERS[layer]
    code = BLOCKER.format(blocked=blocked, modules=modules_of(patterns))
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("package", "only_user"),
    [
        ("torch.distributed", "spes_core/train/parallel.py"),
        ("mlflow", "workbench/tracking.py"),
        ("optuna", "workbench/search.py"),
        ("lm_eval", "workbench/evaluation.py"),
    ],
)
def test_package_has_one_user(package: str, only_user: str) -> None:
    users = {
        str(file.relative_to(ROOT))
        for folder in ("spes_core", "workbench")
        for file in (ROOT / folder).rglob("*.py")
        if any(name == package or name.startswith(package + ".") for name in imported_names(file))
    }
    assert users <= {only_user}


def test_the_engine_knows_nothing_of_the_workbench() -> None:
    for file in (ROOT / "spes_core").rglob("*.py"):
        assert not any(name.split(".")[0] == "workbench" for name in imported_names(file)), file


def test_the_workbench_knows_only_the_engine_s_plain_modules() -> None:
    plain = {
        "config",
        "errors",
        "events",
        "filedigest",
        "invitation",
        "link",
        "model",
        "names",
        "partition",
        "rules",
        "schedules",
        "structure",
        "data",
        "processlife",
        "runfile",
        "sharding",
        "snapshots",
        "torchrun",
        "weightsfile",
        "wireformat",
    }
    makes_keys = {"spes_core.protocol.credentials", "spes_core.protocol"}  # needs neither grpc nor torch
    others = {
        ROOT / "workbench/launch/spawner.py",  # imports the engine to fork from it; trains nothing itself
        ROOT / "workbench/evaluating_model.py",  # these two only run in a process of their own
        ROOT / "workbench/evaluation.py",
    }
    for file in set((ROOT / "workbench").rglob("*.py")) - others:
        for name in imported_names(file):
            if name.startswith("spes_core."):
                assert name.split(".")[1] in plain or name in makes_keys, f"{file} imports {name}"
            assert name.split(".")[0] != "torch", f"{file} imports {name}"


def test_no_file_is_longer_than_500_lines() -> None:
    folders = ("spes_core", "workbench", "tests", "benchmarks")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py") if "_pb2" not in file.name]
    assert [str(file) for file in files if len(file.read_text().splitlines()) > 500] == []


def imported_names(file: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names
