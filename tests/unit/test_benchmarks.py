"""The benchmarks run at toy size, so that their code stays whole; the GPU one says that there is no GPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import gpu, loader, tokenizing
from benchmarks import round as round_benchmark
from benchmarks import workbench as workbench_benchmark
from benchmarks.naive_round import merge
from spes_core.data.batches import TokenSource
from spes_core.model.counting import parameter_counts
from spes_core.names import expert_tensor
from tests.processes.runs import write_corpus
from tests.reference.merge_loop import merge_loop
from workbench import study
from workbench.durable import read_json


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_without_a_gpu_the_benchmark_says_so_and_succeeds(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main([]) == 0
    assert "no CUDA device" in capsys.readouterr().out


def test_the_gpu_benchmark_runs_at_toy_size_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--device", "cpu", "--tiny"]) == 0
    output = capsys.readouterr().out
    assert "relative error" in output and "1/4 trained" in output and "freezing 3/4" in output


def test_bfloat16_errors_are_those_of_rounding_not_zero_and_not_large() -> None:
    errors = dict(gpu.check_numerics(torch.device("cpu")))
    assert len(errors) == 6 and all(1e-5 < error < 2e-2 for error in errors.values())


def test_the_loader_benchmark_sets_reading_beside_a_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "_in_process", lambda folder, steps: 1_000_000 + steps)
    assert loader.main(["--models", "tiny", "--turns", "1", "--corpus-gb", "0.001"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[7:31].strip() for line in lines[1:5]] == list(loader.WAYS)


def test_memory_of_reading_does_not_grow_with_the_corpus(tmp_path: Path) -> None:
    """Every window of a corpus, several times the allowed growth, is read; none of its pages stays."""
    folder = loader.write_corpus(tmp_path / "corpus", 0.1)
    config = replace(loader.run_of("tiny", "domains by size"), nodes=1)
    config = replace(config, data=replace(config.data, sequence_length=4096, global_batch_sequences=64))
    source = TokenSource(folder, config.data, 0)
    source.train_batch(1, 0, 1)
    before = resident_file_bytes()
    for step in range(1, 190):
        source.train_batch(step, 0, 1)
    assert resident_file_bytes() - before < 20e6


def resident_file_bytes() -> int:
    """File pages that are counted as this process's memory."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssFile")]
    return 1024 * int(line.split()[1])


def test_the_round_benchmark_compares_real_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "lines.json"
    arguments = ["--model-mb", "1", "--turns", "1", "--nodes", "2", "--codecs", "bfloat16", "--json", str(path)]
    assert round_benchmark.main(arguments) == 0
    lines = {line["row"]: line for line in json.loads(path.read_text())}
    assert list(lines) == ["naive", "naive + merge", "bfloat16", "bfloat16 + merge"]
    assert all(line["wall_s"] > 0 and line["server_peak"] > 0 and line["nodes_cpu_s"] > 0 for line in lines.values())
    assert lines["naive"]["ratio"] == 1
    model = round_benchmark.model_of(1)
    counts = parameter_counts(model, range(8))  # of 2 nodes, each trains half of the experts
    shared = counts.trained - (counts.total - counts.trained)
    experts = counts.total - shared
    assert lines["bfloat16"]["moved_gb"] == pytest.approx(2 * 2 * (2 * shared + experts) / 1e9)
    assert lines["bfloat16 + merge"]["moved_gb"] == pytest.approx(2 * (2 * counts.trained + 2 * counts.total) / 1e9)
    # Whole states with the names and headers of torch.save; each node downloads the whole model.
    assert lines["naive"]["moved_gb"] == pytest.approx(4 * (2 * counts.trained + 2 * counts.total) / 1e9, rel=0.2)
    assert "bar 1.7" in capsys.readouterr().out


def test_a_benchmarked_model_has_the_size_asked_for_and_the_share_that_is_stated() -> None:
    for megabytes in (40, 252, 1070):
        counts = parameter_counts(round_benchmark.model_of(megabytes), range(4))
        assert 4 * counts.total / 1e6 == pytest.approx(megabytes, rel=0.03)
        assert counts.trained / counts.total == pytest.approx(0.27, abs=0.01)


def test_the_naive_merge_is_the_merge() -> None:
    config = round_benchmark.config_of(replace(round_benchmark.model_of(1), num_layers=1), 4, "float32")
    generator = torch.Generator().manual_seed(0)
    width, hidden = 6, config.model.expert_hidden
    shapes = {"gate_up": (2 * hidden, width), "down": (width, hidden)}
    names = {matrix: [expert_tensor(0, e, matrix) for e in range(16)] for matrix in shapes}
    model = {
        name: torch.randn(shape, generator=generator) for matrix, shape in shapes.items() for name in names[matrix]
    }
    rows = {matrix: [model[name].flatten().tolist() for name in names[matrix]] for matrix in shapes}
    expected = merge_loop(rows["gate_up"], rows["down"], config.merge.num_neighbours, 0.25)
    merge(model, config, 0.25)
    for matrix, merged in zip(shapes, expected, strict=True):
        found = torch.stack([model[name].flatten() for name in names[matrix]])
        torch.testing.assert_close(found, torch.tensor(merged, dtype=torch.float32), rtol=0, atol=1e-5)


def test_a_finished_study_that_is_made_is_one_to_the_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus").mkdir()
    write_corpus(tmp_path / "corpus")
    path = workbench_benchmark.write_study_file(tmp_path, "made", 1, "corpus")
    path.write_text(path.read_text().replace("vocab_size: 512", "vocab_size: 300"))
    made = workbench_benchmark.make_finished(tmp_path, path, 50)
    assert study.main(["made.yaml", "--dry-run"]) == 0
    assert "0 of 10 trials will run." in capsys.readouterr().out
    results = [read_json(file) for file in made.study_dir.glob("trials/*/result.json")]
    assert len(results) == 10 and all(result["status"] == "done" for result in results)
    assert all(len(result["curves"]["train"]) == 50 for result in results)


def test_the_benchmark_of_tokenizing_runs_small(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--turns", "1", "--speed-mb", "0.3", "--memory-mb", "0.3", "--vocab-size", "400"]
    assert tokenizing.main(arguments) == 0
    output = capsys.readouterr().out
    assert "of it (bar 0.8)" in output and "peak memory of 0.3 MB" in output
