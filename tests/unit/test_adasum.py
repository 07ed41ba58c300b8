"""Adasum against its definition, by plain recursion, whatever MPI's timing is."""

from __future__ import annotations

import numpy as np
import pytest

from hvdlite.transport.adasum import Adasum, tree
from hvdlite.transport.local_communicator import LocalCommunicator
from hvdlite.transport.types import DType

from .fake_mpi import FakeWorld, drive, random_scheduler


def pair(a, b):
    aa, bb, ab = a @ a, b @ b, a @ b
    return (1 - ab / (2 * aa) if aa else 1) * a + (1 - ab / (2 * bb) if bb else 1) * b


def adasum(vectors):
    """The first part has the largest power of two that leaves some for the second."""
    if len(vectors) == 1:
        return vectors[0]
    half = 1
    while 2 * half < len(vectors):
        half *= 2
    return pair(adasum(vectors[:half]), adasum(vectors[half:]))


def run(contributions, lengths, dtype=DType.FLOAT64, finish=None, seed=0):
    size = len(contributions)
    world = FakeWorld(size, random_scheduler(seed))
    buffers = [array.copy() for array in contributions]
    drive(
        world,
        [
            [Adasum(comm, 32).allreduce(buffer, lengths, dtype, finish, 5)]
            for comm, buffer in zip(world.communicators, buffers, strict=True)
        ],
    )
    world.check_quiet()
    for buffer in buffers[1:]:
        assert buffer.tobytes() == buffers[0].tobytes()
    return buffers[0]


def vectors(size, length, seed=0):
    rng = np.random.default_rng(100 * size + length + seed)
    common = rng.normal(size=length)
    return [common + (0.3 + r) * rng.normal(size=length) for r in range(size)]


def by_tensor(contributions, lengths):
    bounds = np.cumsum(lengths)[:-1]
    pieces = [np.split(array, bounds) for array in contributions]
    return np.concatenate([adasum(list(parts)) for parts in zip(*pieces, strict=True)])


@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize("lengths", [[1], [3], [40], [5, 0, 17, 1, 30], [1, 1]], ids=str)
def test_is_what_the_recursion_gives(size, lengths):
    contributions = vectors(size, sum(lengths))
    result = run(contributions, lengths)
    np.testing.assert_allclose(result, by_tensor(contributions, lengths), rtol=1e-12)


def test_orthogonal_vectors_are_added_and_parallel_ones_averaged():
    eye = 3 * np.eye(4)
    np.testing.assert_allclose(run(list(eye), [4]), [3, 3, 3, 3])
    same = np.arange(4.0)
    np.testing.assert_allclose(run([same] * 4, [4]), same)
    # 2a and a: (1 - 2/8) 2a + (1 - 2/2) a
    np.testing.assert_allclose(run([2 * same, same], [4]), 1.5 * same)
    np.testing.assert_allclose(run([same, 0 * same, 0 * same], [4]), same)
    np.testing.assert_array_equal(run([0 * same] * 3, [4]), 0 * same)


def test_each_tensor_has_coefficients_of_its_own():
    a, b = np.array([1.0, 0, 1, 1]), np.array([0.0, 1, 1, 1])
    np.testing.assert_allclose(run([a, b], [2, 2]), [1, 1, 1, 1])
    assert not np.allclose(run([a, b], [4]), [1, 1, 1, 1])


@pytest.mark.parametrize("size", [2, 3, 4])
def test_other_types(size):
    wide = vectors(size, 50)
    narrow = [array.astype(np.float32) for array in wide]
    np.testing.assert_allclose(run(narrow, [50], DType.FLOAT32), adasum(narrow), rtol=1e-5)
    halves = [array.astype(np.float16) for array in wide]
    wanted = adasum([array.astype(np.float64) for array in halves])
    np.testing.assert_allclose(run(halves, [50], DType.FLOAT16), wanted, rtol=1e-3, atol=1e-4)
    bits = [(array.view(np.uint32) >> 16).astype(np.uint16) for array in narrow]
    exact = [(array.astype(np.uint32) << 16).view(np.float32) for array in bits]
    result = (run(bits, [50], DType.BFLOAT16).astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_allclose(result, adasum(exact), rtol=1e-2, atol=1e-3)


def test_squares_of_large_and_small_numbers_are_no_trouble():
    for factor in (1e30, 1e-40):
        contributions = [(factor * v).astype(np.float32) for v in vectors(3, 20)]
        wanted = adasum([v.astype(np.float64) for v in contributions])
        result = run(contributions, [20], DType.FLOAT32).astype(np.float64)
        np.testing.assert_allclose(result / factor, wanted / factor, rtol=2e-5, atol=1e-4)


def test_finish_and_nan():
    def finish(piece):
        piece *= 2

    contributions = vectors(3, 11)
    result = run(contributions, [11], finish=finish)
    np.testing.assert_allclose(result, 2 * adasum(contributions), rtol=1e-12)
    contributions[1][4] = np.nan
    assert np.isnan(run(contributions, [11])).all()
    (alone,) = vectors(1, 4)
    buffer = alone.copy()
    list(Adasum(LocalCommunicator()).allreduce(buffer, [4], DType.FLOAT64, finish, 0))
    np.testing.assert_array_equal(buffer, 2 * alone)


def test_timing_changes_nothing():
    contributions = vectors(5, 33)
    results = {run(contributions, [20, 13], seed=seed).tobytes() for seed in range(5)}
    assert len(results) == 1


@pytest.mark.parametrize("size", range(1, 10))
def test_the_tree_is_that_of_the_recursion(size):
    names = [str(rank) for rank in range(size)]
    for level in tree(size):
        for first, second in level:
            names[first] = f"({names[first]} {names[second]})"

    def nested(ranks):
        if len(ranks) == 1:
            return str(ranks[0])
        half = 1
        while 2 * half < len(ranks):
            half *= 2
        return f"({nested(ranks[:half])} {nested(ranks[half:])})"

    assert names[0] == nested(range(size))


def test_sends_as_little_as_an_allreduce():
    size, length = 4, 1000
    world = FakeWorld(size)
    sent = [0] * size

    class Counting:
        def __init__(self, comm):
            self.comm = comm

        def __getattr__(self, name):
            return getattr(self.comm, name)

        def isend(self, data, dest, tag):
            sent[self.comm.rank] += data.nbytes
            return self.comm.isend(data, dest, tag)

    buffers = vectors(size, length)
    drive(
        world,
        [
            [Adasum(Counting(comm)).allreduce(buffer, [length], DType.FLOAT64, None, 0)]
            for comm, buffer in zip(world.communicators, buffers, strict=True)
        ],
    )
    bound = 2 * (size - 1) / size * length * 8
    assert all(bound <= nbytes < bound + 300 for nbytes in sent)
