"""Every element type through every form of every operation (B22), as a group and in place."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import hvdlite_torch  # noqa: E402

from .torch_helpers import DTYPES, assert_close, tensor, wanted  # noqa: E402


@pytest.fixture
def hvd(hvd):
    return hvdlite_torch


@pytest.mark.parametrize("name", DTYPES)
def test_groups_of_every_type(hvd, world, name):
    dtype = DTYPES[name]
    shapes = [(3, 2), (), (0, 4), (7,)]
    inputs = [[tensor(r, s, dtype, i) for i, s in enumerate(shapes)] for r in world.ranks]
    forms = {
        "out of place": lambda ts: hvd.grouped_allreduce(ts, op=hvd.Sum),
        "in place": lambda ts: hvd.grouped_allreduce_(ts, op=hvd.Sum),
        "async": lambda ts: hvd.synchronize(hvd.grouped_allreduce_async(ts, op=hvd.Sum)),
        "async in place": lambda ts: hvd.synchronize(hvd.grouped_allreduce_async_(ts, op=hvd.Sum)),
    }
    for form, reduce in forms.items():
        mine = [t.clone() for t in inputs[world.rank]]
        results = reduce(mine)
        assert len(results) == len(shapes)
        for i, result in enumerate(results):
            assert_close(result, wanted([row[i] for row in inputs], "Sum"), f"{form} {i}")
            assert (result is mine[i]) == form.endswith("in place")


@pytest.mark.parametrize("name", DTYPES)
def test_movement_of_every_type(hvd, world, name):
    dtype = DTYPES[name]
    ranks, size = world.ranks, world.size
    rows = [tensor(r, (r, 3), dtype) for r in ranks]  # rank 0 has none
    others = [tensor(r, (2, 1), dtype, 1) for r in ranks]
    pair = [rows[world.rank], others[world.rank]]
    for results in (
        hvd.grouped_allgather(pair),
        hvd.synchronize(hvd.grouped_allgather_async(pair)),
        [hvd.synchronize(hvd.allgather_async(t)) for t in pair],
    ):
        assert_close(results[0], torch.cat(rows))
        assert_close(results[1], torch.cat(others))
    root = size // 2
    source = tensor(root, (2, 3), dtype)
    for shape_of in (lambda t: t, lambda t: t.t()):
        mine = shape_of(tensor(world.rank, (2, 3), dtype))
        assert_close(hvd.synchronize(hvd.broadcast_async(mine, root)), shape_of(source))
        assert hvd.synchronize(hvd.broadcast_async_(mine, root)) is mine
        assert_close(mine, shape_of(source))
    # Rank r sends d + 1 rows to rank d, so everybody gets rank + 1 rows from everybody.
    count = size * (size + 1) // 2
    sent = [tensor(r, (count, 2), dtype) for r in ranks]
    start = world.rank * (world.rank + 1) // 2
    expected = torch.cat([part[start : start + world.rank + 1] for part in sent])
    splits = [d + 1 for d in ranks]
    for result, received in (
        hvd.alltoall(sent[world.rank], splits),
        hvd.synchronize(hvd.alltoall_async(sent[world.rank], torch.tensor(splits))),
    ):
        assert_close(result, expected)
        assert received.tolist() == [world.rank + 1] * size


@pytest.mark.parametrize("name", DTYPES)
def test_reducescatter_of_every_type(hvd, world, name):
    dtype = DTYPES[name]
    inputs = [tensor(r, (world.size + 1, 2), dtype) for r in world.ranks]
    others = [tensor(r, (world.size,), dtype, 1) for r in world.ranks]
    first = world.rank + (world.rank > 0)
    rows = slice(first, first + 1 + (world.rank == 0))
    for op in ("Sum", "Min", "Max", "Product", "Average"):
        refused = (name == "bool" and op == "Average") or (
            dtype.is_complex and op in ("Min", "Max")
        )
        arguments = {"op": getattr(hvd, op)}
        pair = [inputs[world.rank], others[world.rank]]
        if refused:
            with pytest.raises(TypeError, match=f"(?i){op}"):
                hvd.grouped_reducescatter(pair, **arguments)
            continue
        for results in (
            hvd.grouped_reducescatter(pair, **arguments),
            hvd.synchronize(hvd.grouped_reducescatter_async(pair, **arguments)),
            [hvd.synchronize(hvd.reducescatter_async(t, **arguments)) for t in pair],
        ):
            assert_close(results[0], wanted(inputs, op)[rows], op)
            assert_close(results[1], wanted(others, op)[world.rank : world.rank + 1], op)


@pytest.mark.parametrize("name", [n for n in DTYPES if n != "bool"])
def test_sparse_sums_of_every_type(hvd, world, name):
    dtype = DTYPES[name]
    dense = []
    for rank in world.ranks:
        rows = tensor(rank, (5, 2), dtype)
        rows[rank % 5] = 0
        dense.append(rows)
    sparse = dense[world.rank].to_sparse(1)
    total = hvd.synchronize(hvd.sparse_allreduce_async(sparse, name=f"sparse {name}", op=hvd.Sum))
    assert total.dtype == dtype and total.layout is torch.sparse_coo
    assert_close(total.to_dense(), wanted(dense, "Sum"))


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64", "complex64"])
def test_gradients_of_every_type(hvd, world, name):
    dtype = DTYPES[name]
    mine = tensor(world.rank, (world.size, 2), dtype).requires_grad_()
    weights = [tensor(r, (world.size, 2), dtype, 5) for r in world.ranks]
    result = hvd.allreduce(mine, op=hvd.Sum)
    assert result.dtype == dtype
    result.backward(weights[world.rank])
    assert_close(mine.grad, wanted(weights, "Sum"))
