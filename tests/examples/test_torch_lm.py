"""The language model learns, and an interrupted run ends where an uninterrupted one does."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.parallel.jobs import JobResult, run_job, slower

SCRIPT = Path(__file__).parents[2] / "examples" / "torch_lm.py"

torch = pytest.importorskip("torch")
pytest.importorskip("tqdm")


def _run(np: int | None, checkpoint: Path, epochs: int, size: int) -> JobResult:
    arguments = ["--checkpoint", checkpoint, "--epochs", epochs, "--bytes", size]
    result = run_job(np, SCRIPT, timeout=100, arguments=[str(a) for a in arguments])
    assert result.returncode == 0, result
    assert result.left_behind == 0, result
    assert "Warning" not in result.stderr, result
    return result


def _bits(pattern: str, text: str) -> float:
    found = re.search(rf"^{pattern}: ([0-9.]+) bits per byte", text, re.MULTILINE)
    assert found, text
    return float(found[1])


def _tensors(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [tensor for key in sorted(value, key=str) for tensor in _tensors(value[key])]
    return [value] if isinstance(value, torch.Tensor) else []


def _assert_equal(one: Path, other: Path) -> None:
    first, second = torch.load(one), torch.load(other)
    assert first["progress"] == second["progress"]
    for part in ("model", "optimizer"):
        tensors = _tensors(first[part])
        assert tensors
        for mine, theirs in zip(tensors, _tensors(second[part]), strict=True):
            assert torch.equal(mine, theirs)


def test_learns_text_and_resumes(tmp_path: Path) -> None:
    result = _run(2, tmp_path / "whole.pt", 2, 180_000)
    by_frequency = _bits("by frequency alone", result.stdout)
    assert 4 < by_frequency < 6, result  # plain text
    bits = _bits("validation", result.stdout)
    assert 1 < bits < by_frequency - 1, result

    first = _run(2, tmp_path / "parts.pt", 1, 180_000)
    assert "resumed" not in first.stdout
    second = _run(2, tmp_path / "parts.pt", 2, 180_000)
    assert "resumed after epoch 1" in second.stdout and "epoch 1:" not in second.stdout
    assert _bits("validation", second.stdout) == bits
    _assert_equal(tmp_path / "whole.pt", tmp_path / "parts.pt")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["parts.pt", "whole.pt"]


def test_alone_and_interrupted(tmp_path: Path) -> None:
    checkpoint = tmp_path / "lm.pt"
    command = [sys.executable, str(SCRIPT), "--checkpoint", str(checkpoint), "--bytes", "20000"]
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[1]), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, "--epochs", "1000"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Where the tests run in the background, their children would be deaf to it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("epoch 1:"):
                process.send_signal(signal.SIGINT)
                break
        _, errors = process.communicate(timeout=slower(30))
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    assert process.returncode == 1, errors
    assert "interrupted" in errors and "Traceback" not in errors, errors
    epochs = torch.load(checkpoint)["progress"]["epochs"]
    assert epochs >= 1
    resumed = _run(None, checkpoint, epochs + 1, 20_000)
    assert f"resumed after epoch {epochs}" in resumed.stdout, resumed
    assert f"epoch {epochs + 1}:" in resumed.stdout, resumed
