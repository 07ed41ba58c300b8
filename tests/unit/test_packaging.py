"""What the packages look like from outside: versions, types, imports."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import hvdlite
import hvdlite_tf

ROOT = Path(__file__).parents[2]


def test_the_version_is_the_same_everywhere() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(r'^version = "(.+)"$', text, re.MULTILINE)
    assert found
    assert found[1] == hvdlite.__version__


@pytest.mark.parametrize("package", ["hvdlite", "hvdlite_torch", "hvdlite_tf"])
def test_packages_say_that_they_are_typed(package: str) -> None:
    assert (ROOT / package / "py.typed").exists()


def test_importing_brings_no_framework_and_starts_no_mpi() -> None:
    code = """
import sys, hvdlite, hvdlite_tf
loaded = sorted({"torch", "tensorflow", "keras", "mpi4py.MPI"} & set(sys.modules))
sys.exit(f"imported {loaded}" if loaded else 0)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_the_tensorflow_adapter_says_that_it_is_missing() -> None:
    with pytest.raises(NotImplementedError, match=r"hvdlite_tf\.init .* not been written yet"):
        hvdlite_tf.init()
    with pytest.raises(NotImplementedError, match=r"hvdlite_tf\.DistributedGradientTape"):
        from hvdlite_tf import DistributedGradientTape  # noqa: F401


def test_the_missing_adapter_is_an_ordinary_module_to_tools() -> None:
    assert not hasattr(hvdlite_tf, "__wrapped__")
    assert "DistributedOptimizer" not in dir(hvdlite_tf)
