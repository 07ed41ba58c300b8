"""Data-parallel training of TensorFlow models over MPI."""

from __future__ import annotations

__all__: list[str] = []
