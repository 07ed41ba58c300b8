"""The engine's counters tell what happened."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest


def _delta(hvd, work):
    before = hvd.statistics()
    work()
    after = hvd.statistics()
    return {
        field.name: getattr(after, field.name) - getattr(before, field.name)
        for field in dataclasses.fields(after)
    }


def test_counts_tensors_and_bytes(hvd, world):
    def work():
        for step in range(5):
            hvd.allreduce(np.ones(1000, np.float32), name=f"counted.{step}", op=hvd.Sum)

    change = _delta(hvd, work)
    assert change["tensors"] == 5
    assert change["bytes"] == 5 * 4000
    assert change["responses"] == 5
    assert change["batches"] == 5
    assert change["waiting_seconds"] > 0
    assert change["rounds"] >= 5 or world.size == 1
    assert hvd.statistics().queue_depth == 0
    assert hvd.statistics().in_flight == 0


def test_counts_what_each_rank_has_to_send(hvd, world):
    n = world.size
    data = np.zeros(1200, np.float32)

    def wire(work):
        return _delta(hvd, work)["wire_bytes"]

    assert wire(lambda: hvd.allreduce(data)) == 2 * (n - 1) * 4800 // n
    assert wire(lambda: hvd.reducescatter(data)) == (n - 1) * 4800 // n
    assert wire(lambda: hvd.allgather(data)) == (n - 1) * 4800
    assert wire(lambda: hvd.broadcast(data, 0)) == (n - 1) * 4800 // n
    # To rank r go r rows, and what stays here is not sent.
    rows = np.zeros((sum(range(n)), 3), np.float32)
    sent = sum(r for r in range(n) if r != world.rank)
    assert wire(lambda: hvd.alltoall(rows, list(range(n)))) == sent * 12


@pytest.mark.np(2, 3, 4)
def test_repeated_names_are_answered_from_the_cache(hvd, world):
    def step():
        for i in range(20):
            handle = hvd.allreduce_async(np.ones(10 + i), name=f"cached.{i}")
            hvd.synchronize(handle)

    first, second = _delta(hvd, step), _delta(hvd, step)
    assert first["cache_hits"] == 0
    assert second["cache_hits"] == 20
    assert hvd.statistics().cache_size >= 20


@pytest.mark.np(2, 3)
def test_group_travels_as_one(hvd, world):
    arrays = [np.ones(10 + i, np.float32) for i in range(30)]
    change = _delta(hvd, lambda: hvd.grouped_allreduce(arrays, op=hvd.Sum))
    assert change["responses"] == 1
    assert change["tensors"] == 30
    assert change["batches"] == 1
    assert change["bytes"] == 4 * sum(len(array) for array in arrays)


@pytest.mark.np(2, 3)
def test_threshold_limits_what_travels_together(hvd, world, monkeypatch):
    arrays = [np.ones(100, np.float32) for _ in range(30)]
    try:
        for threshold, batches in ((0, 30), (1, 30), (1200, 10), (400 * 30, 1)):
            monkeypatch.setenv("HVDLITE_FUSION_THRESHOLD", str(threshold))
            hvd.shutdown()
            hvd.init()
            change = _delta(hvd, lambda: hvd.grouped_allreduce(arrays, op=hvd.Sum))
            assert (change["batches"], change["tensors"]) == (batches, 30), threshold
    finally:
        monkeypatch.undo()
        hvd.shutdown()
        hvd.init()


def test_begins_anew_with_every_init(hvd, world):
    hvd.allreduce(np.ones(3))
    hvd.shutdown()
    hvd.init()
    assert hvd.statistics().tensors == 0
    assert hvd.statistics().bytes == 0


def test_snapshot_cannot_be_changed(hvd):
    with pytest.raises(dataclasses.FrozenInstanceError):
        hvd.statistics().tensors = 0
