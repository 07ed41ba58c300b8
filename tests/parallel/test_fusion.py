"""How tensors share buffers never shows in the numbers (B26)."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from .expected import assert_equal, known, reduced

SIZES = [int(size) for size in np.random.default_rng(26).integers(1, 400, 300)]
SIZES[::50] = [1, 3, 7, 5001, 1021, 2]


@pytest.fixture
def restarted(hvd, monkeypatch):
    """Start the engine anew under other settings, and put it back afterwards."""

    def restart(**settings):
        hvd.shutdown()
        for name, value in settings.items():
            monkeypatch.setenv(f"HVDLITE_{name}", str(value))
        hvd.init()

    yield restart
    monkeypatch.undo()
    hvd.shutdown()
    hvd.init()


def _tensors(rank):
    rng = np.random.default_rng((26, rank))
    return [rng.standard_normal(size, np.float32) for size in SIZES]


def _all_at_once(hvd, arrays):
    handles = [hvd.allreduce_async(a, name=f"f{i}", op=hvd.Sum) for i, a in enumerate(arrays)]
    return [hvd.synchronize(handle) for handle in handles]


@pytest.mark.np(2, 3)
@pytest.mark.limit(60)
def test_thresholds(hvd, world, comm, restarted):
    mine = _tensors(world.rank)
    exact = sum(SIZES[:10]) * 4
    by_threshold = {}
    # Off, useless, an exact fit, smaller than the largest tensor, everything in one buffer.
    for threshold in (0, 1, exact, 4 * 5000, 64 * 1024 * 1024):
        restarted(FUSION_THRESHOLD=threshold)
        for _ in range(2):  # once negotiated, once from the cache
            by_threshold[threshold] = _all_at_once(hvd, mine)
            digest = hashlib.sha256(b"".join(a.tobytes() for a in by_threshold[threshold]))
            assert len(set(comm.allgather(digest.digest()))) == 1
    wanted = np.sum([np.concatenate(_tensors(r)).astype(np.float64) for r in world.ranks], axis=0)
    for threshold, results in by_threshold.items():
        flat = np.concatenate(results)
        np.testing.assert_allclose(flat, wanted, rtol=1e-5, atol=1e-5, err_msg=f"{threshold}")
        if world.size == 2:  # a + b is b + a: not one bit may differ
            np.testing.assert_array_equal(flat, np.concatenate(by_threshold[0]))


@pytest.mark.np(2, 3)
@pytest.mark.parametrize("threshold", (0, 1, 4000, 10_000_000))
def test_mixture_that_must_not_be_fused_together(hvd, world, restarted, threshold):
    restarted(FUSION_THRESHOLD=threshold)
    dtypes = ("float32", "float64", "int32", "float16")
    ops = ("Sum", "Average", "Max", "Min")
    for repeat in range(3):
        inputs, handles = [], []
        for i in range(120):
            dtype, op = dtypes[i % 4], ops[i // 4 % 4]
            scale = 1.0 if i % 3 else 2.0
            arrays = [known(rank, i + 1, dtype, seed=i + repeat) for rank in world.ranks]
            handles.append(
                hvd.allreduce_async(
                    arrays[world.rank], name=f"m{i}", op=getattr(hvd, op), postscale_factor=scale
                )
            )
            inputs.append((arrays, op, scale))
        for handle, (arrays, op, scale) in zip(handles, inputs, strict=True):
            result = hvd.synchronize(handle)
            if op == "Average" and scale != 1 and result.dtype.kind == "i":
                # Where the rounding falls is documented for each factor alone.
                assert result.dtype == arrays[0].dtype
                continue
            wanted = reduced(arrays, op)
            assert_equal(result, (wanted * scale).astype(wanted.dtype), op)


@pytest.mark.np(2, 3)
def test_groups_and_single_tensors_together(hvd, world, restarted):
    restarted(FUSION_THRESHOLD=2048)
    for repeat in range(3):
        shapes = [(i % 7 + 1, i % 3 + 1) for i in range(30)]
        inputs = [[known(r, shape, seed=repeat) for shape in shapes] for r in world.ranks]
        totals = [reduced(parts, "Sum") for parts in zip(*inputs, strict=True)]
        mine = inputs[world.rank]
        group = hvd.grouped_allreduce_async(mine, name="group", op=hvd.Sum)
        singles = [hvd.allreduce_async(a, name=f"s{i}", op=hvd.Sum) for i, a in enumerate(mine)]
        gathers = [hvd.allgather_async(a, name=f"g{i}") for i, a in enumerate(mine)]
        for result, total in zip(hvd.synchronize(group), totals, strict=True):
            assert_equal(result, total)
        for single, total in zip(singles, totals, strict=True):
            assert_equal(hvd.synchronize(single), total)
        for gather, parts in zip(gathers, zip(*inputs, strict=True), strict=True):
            assert_equal(hvd.synchronize(gather), np.concatenate(parts))


@pytest.mark.np(2, 3)
@pytest.mark.parametrize(
    "settings",
    (
        {"CACHE_CAPACITY": 0},
        {"CACHE_CAPACITY": 3},
        {"CYCLE_TIME": 0},
        {"CYCLE_TIME": 20},
        {"SEGMENT_BYTES": 64},
        {"SMALL_BYTES": 0},
        {"TRANSPORT": "mpi"},
        {"TRANSPORT": "ring"},
    ),
    ids=lambda settings: "-".join(f"{key}={value}" for key, value in settings.items()),
)
def test_other_settings_give_the_same_numbers(hvd, world, restarted, settings):
    restarted(**settings)
    for repeat in range(3):
        handles = {}
        for i in np.random.default_rng((repeat, world.rank)).permutation(20):
            array = known(world.rank, 37 * i + 1, seed=int(i))
            handles[i] = hvd.allreduce_async(array, name=f"o{i}", op=hvd.Sum)
        for i, handle in handles.items():
            inputs = [known(rank, 37 * i + 1, seed=int(i)) for rank in world.ranks]
            assert_equal(hvd.synchronize(handle), reduced(inputs, "Sum"))
    inputs = [known(rank, (5, rank + 3), "float64") for rank in world.ranks]
    rows = [array.T for array in inputs]
    assert_equal(hvd.allgather(rows[world.rank]), np.concatenate(rows))
    assert_equal(hvd.broadcast(np.full(9, world.rank), 1), np.full(9, 1))
    squares = [known(rank, (world.size, 40)) for rank in world.ranks]
    mine = squares[world.rank]
    assert_equal(hvd.alltoall(mine), np.stack([square[world.rank] for square in squares]))
    total = reduced(squares, "Sum")
    assert_equal(hvd.reducescatter(mine, op=hvd.Sum), total[world.rank :][:1])
