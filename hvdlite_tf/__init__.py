"""The TensorFlow and Keras adapter of hvdlite: planned, not there yet.

The package can be imported, with or without TensorFlow, so that its name is taken and tools
can see it. Using anything of it raises an error that says so.
"""

from __future__ import annotations

from typing import NoReturn

__all__: list[str] = []


def __getattr__(name: str) -> NoReturn:
    # Python's own machinery probes modules for names like __path__ and expects a plain "no".
    if name.startswith("__") and name.endswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    raise NotImplementedError(
        f"hvdlite_tf.{name} is not available: the TensorFlow adapter of hvdlite has not been "
        "written yet. For PyTorch use hvdlite_torch; for NumPy arrays use hvdlite itself."
    )
