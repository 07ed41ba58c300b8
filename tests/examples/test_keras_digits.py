"""The example of Keras's `fit`."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from tests.parallel.jobs import run_job

SCRIPT = Path(__file__).parents[2] / "examples" / "keras_digits.py"

for name in ("tensorflow", "keras", "sklearn"):
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"needs {name}", allow_module_level=True)


@pytest.mark.parametrize("np", [None, 2, 4], ids=["alone", "np2", "np4"])
def test_learns_digits(np: int | None) -> None:
    result = run_job(np, SCRIPT, timeout=200, env={"TF_CPP_MIN_LOG_LEVEL": "2"})
    assert result.returncode == 0, result
    assert result.left_behind == 0, result
    *_, speed, last = result.stdout.splitlines()
    assert re.fullmatch(rf"[0-9]+ images per second on {np or 1} rank\(s\)", speed), result
    said = re.fullmatch(r"accuracy: ([0-9]{1,3}\.[0-9]) %", last)
    assert said, result
    assert float(said[1]) >= 97.0, result
