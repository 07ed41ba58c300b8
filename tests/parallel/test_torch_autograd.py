"""Gradients through collectives, against autograd on all ranks' tensors in one process (B37)."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import hvdlite_torch  # noqa: E402

from .torch_helpers import assert_close  # noqa: E402


@pytest.fixture
def hvd(hvd):
    return hvdlite_torch


def _random(rank, shape, seed=0):
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _check(world, shapes, collective, model):
    """Compare the gradient of a collective with that of its model in one process.

    Each rank's loss is a nonlinear function of its result with weights of its own; the model
    maps the list of all ranks' inputs to the list of all ranks' results.
    """
    inputs = [_random(rank, shape).requires_grad_() for rank, shape in enumerate(shapes)]
    results = model(inputs)
    weights = [_random(rank, result.shape, seed=1) for rank, result in enumerate(results)]
    losses = [(w * r * r).sum() for w, r in zip(weights, results, strict=True)]
    sum(losses).backward()
    mine = _random(world.rank, shapes[world.rank]).requires_grad_()
    result = collective(mine)
    assert_close(result, results[world.rank].detach())
    (weights[world.rank] * result * result).sum().backward()
    assert_close(mine.grad, inputs[world.rank].grad, tolerance=1e-12)


def test_allreduce(hvd, world):
    shapes = [(3, 2)] * world.size

    def model(inputs, factor=1.0):
        return [sum(inputs) * factor] * world.size

    _check(world, shapes, lambda x: hvd.allreduce(x, op=hvd.Sum), model)
    _check(world, shapes, hvd.allreduce, lambda x: model(x, 1 / world.size))
    _check(
        world,
        shapes,
        lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=3.0, postscale_factor=0.5, name="n"),
        lambda x: model(x, 1.5),
    )


def test_allreduce_against_finite_differences(hvd, world):
    # All ranks perturb the same element of rank 0's input together, so that it can be checked
    # with the collective itself as the function.
    weights = _random(world.rank, (4,), seed=2)

    def loss(x):
        return (hvd.allreduce(x) ** 3 * weights).sum()

    mine = _random(world.rank, (4,)).requires_grad_()
    loss(mine).backward()
    step = 1e-6
    for i in range(4):
        shift = torch.zeros(4, dtype=torch.float64)
        shift[i] = step if world.rank == 0 else 0.0
        with torch.no_grad():
            difference = loss(mine + shift) - loss(mine - shift)
        slope = hvd.allreduce(difference, op=hvd.Sum).item() / (2 * step)
        if world.rank == 0:
            assert abs(slope - mine.grad[i].item()) < 1e-6


def test_gradients_of_other_reductions_are_refused(hvd, world):
    for op in (hvd.Min, hvd.Max, hvd.Product):
        mine = torch.ones(2, requires_grad=True)
        result = hvd.allreduce(mine, op=op)
        with pytest.raises(NotImplementedError, match=str(op)):
            result.sum().backward()


def test_grouped_allreduce(hvd, world):
    shapes = [(3, 2)] * world.size
    _check(
        world,
        shapes,
        lambda x: torch.cat(hvd.grouped_allreduce([x, x * x], op=hvd.Sum)),
        lambda inputs: [torch.cat([sum(inputs), sum(x * x for x in inputs)])] * world.size,
    )
    # An output that is not used, and integers in the group, which have no gradient.
    mine = torch.ones(2, requires_grad=True)
    first, second, third = hvd.grouped_allreduce([mine, mine * 3, torch.ones(1).int()], op=hvd.Sum)
    second.sum().backward()
    assert first.requires_grad and not third.requires_grad and third.item() == world.size
    assert_close(mine.grad, torch.full((2,), 3.0 * world.size))


def test_allgather(hvd, world):
    # Rank 0 has no rows where there are several ranks.
    shapes = [(r if world.size > 1 else 2, 3) for r in world.ranks]
    _check(world, shapes, hvd.allgather, lambda x: [torch.cat(x)] * world.size)
    _check(
        world,
        shapes,
        lambda x: torch.cat(hvd.grouped_allgather([x, torch.tanh(x)], name="both")),
        lambda x: [torch.cat([*x, *map(torch.tanh, x)])] * world.size,
    )


def test_broadcast(hvd, world):
    shapes = [(2, 3)] * world.size
    root = world.size - 1

    def model(inputs):
        return [inputs[root] + 0 * sum(inputs)] * world.size

    _check(world, shapes, lambda x: hvd.broadcast(x, root), model)


def test_broadcast_gives_other_ranks_zeros(hvd, world):
    mine = torch.ones(3, requires_grad=True)
    hvd.broadcast(mine, 0).sum().backward()
    assert_close(mine.grad, torch.full((3,), float(world.size) if world.rank == 0 else 0.0))


def test_alltoall(hvd, world):
    shapes = [(2 * world.size, 2)] * world.size
    _check(
        world,
        shapes,
        hvd.alltoall,
        lambda x: [torch.cat([t[2 * r : 2 * r + 2] for t in x]) for r in world.ranks],
    )
    # Rank r sends s + 1 rows to rank s.
    counts = [s + 1 for s in world.ranks]
    starts = [sum(counts[:s]) for s in world.ranks]
    shapes = [(sum(counts), 2)] * world.size
    _check(
        world,
        shapes,
        lambda x: hvd.alltoall(x, splits=counts)[0],
        lambda x: [torch.cat([t[starts[r] : starts[r] + r + 1] for t in x]) for r in world.ranks],
    )


def test_reducescatter(hvd, world):
    rows = 2 * world.size + 1
    shapes = [(rows, 2)] * world.size
    starts = [2 * r + min(r, 1) for r in [*world.ranks, world.size]]

    def model(inputs, factor=1.0):
        total = sum(inputs) * factor
        return [total[starts[r] : starts[r + 1]] for r in world.ranks]

    _check(world, shapes, lambda x: hvd.reducescatter(x, op=hvd.Sum), model)
    _check(world, shapes, hvd.reducescatter, lambda x: model(x, 1 / world.size))
    _check(
        world,
        shapes,
        lambda x: hvd.reducescatter(x, postscale_factor=4.0),
        lambda x: model(x, 4 / world.size),
    )


def test_compression_passes_gradients(hvd, world):
    mine = torch.ones(3, requires_grad=True)
    result = hvd.allreduce(mine, op=hvd.Sum, compression=hvd.Compression.bf16)
    assert result.dtype == torch.float32
    (result * 2).sum().backward()
    assert_close(mine.grad, torch.full((3,), 2.0 * world.size))
