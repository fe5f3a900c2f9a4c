"""The GPU benchmark says that there is no GPU, and its logic runs on a CPU."""

from __future__ import annotations

import pytest
import torch

from benchmarks import gpu


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
