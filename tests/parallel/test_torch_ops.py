"""Collectives on PyTorch tensors: types, strides, odd tensors, arguments (B3, B22, B24)."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import hvdlite_torch  # noqa: E402

from .torch_helpers import DTYPES, assert_close, tensor, wanted  # noqa: E402

FORMS = ("allreduce", "allreduce_async", "allreduce_", "allreduce_async_")


@pytest.fixture
def hvd(hvd):
    return hvdlite_torch


def _reduce(hvd, form, mine, **options):
    before = mine.clone()
    result = getattr(hvd, form)(mine, **options)
    if "async" in form:
        result = hvd.synchronize(result)
    if form.endswith("_"):
        assert result is mine
    else:
        assert torch.equal(mine, before), "the input was changed"
        assert result.data_ptr() != mine.data_ptr() or result.numel() == 0
    return result


# -- types --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DTYPES)
def test_allreduce_of_every_type(hvd, world, name):
    dtype = DTYPES[name]
    inputs = [tensor(rank, (5, 7), dtype) for rank in world.ranks]
    for op in ("Sum", "Average", "Min", "Max", "Product"):
        refused = (name == "bool" and op == "Average") or (
            dtype.is_complex and op in ("Min", "Max")
        )
        for form in FORMS:
            mine = inputs[world.rank].clone()
            if refused:
                with pytest.raises(TypeError, match=f"(?i){op}"):
                    _reduce(hvd, form, mine, op=getattr(hvd, op))
            else:
                result = _reduce(hvd, form, mine, op=getattr(hvd, op))
                assert_close(result, wanted(inputs, op), f"{form} {op}")


@pytest.mark.parametrize("name", DTYPES)
def test_movement_of_every_type(hvd, world, name):
    dtype = DTYPES[name]
    inputs = [tensor(rank, (rank + 1, 3), dtype) for rank in world.ranks]
    assert_close(hvd.allgather(inputs[world.rank]), torch.cat(inputs))
    root = world.size - 1
    mine = tensor(world.rank, (4, 2), dtype)
    assert_close(hvd.broadcast(mine, root), tensor(root, (4, 2), dtype))
    assert hvd.broadcast_(mine, root) is mine
    assert_close(mine, tensor(root, (4, 2), dtype))
    squares = [tensor(rank, (world.size, 2), dtype) for rank in world.ranks]
    received = torch.stack([square[world.rank] for square in squares])
    assert_close(hvd.alltoall(squares[world.rank]), received)


@pytest.mark.parametrize("name", [name for name in DTYPES if name != "bool"])
def test_reducescatter_of_every_type(hvd, world, name):
    dtype = DTYPES[name]
    inputs = [tensor(rank, (2 * world.size + 1, 3), dtype) for rank in world.ranks]
    start = 2 * world.rank + min(world.rank, 1)
    mine = slice(start, start + 2 + (world.rank == 0))
    for op in ("Average", "Sum"):
        result = hvd.reducescatter(inputs[world.rank], op=getattr(hvd, op))
        assert_close(result, wanted(inputs, op)[mine], op)


@pytest.mark.parametrize("value", [torch.ones(2).to(torch.float8_e5m2), torch.ones(3).to_sparse()])
def test_what_does_not_travel_is_refused_at_once(hvd, world, value):
    for call in (hvd.allreduce, hvd.allreduce_, hvd.allgather, hvd.alltoall, hvd.reducescatter):
        with pytest.raises(TypeError, match=f"tensor.*rank {world.rank}"):
            call(value)
    with pytest.raises(TypeError, match="tensor"):
        hvd.broadcast(value, 0)
    assert_close(hvd.allreduce(torch.ones(2), op=hvd.Sum), torch.full((2,), float(world.size)))


@pytest.mark.parametrize("value", [[1.0, 2.0], None, 3.0, "text"])
def test_what_is_no_tensor_is_refused_by_name(hvd, world, value):
    calls = (hvd.allreduce, hvd.allreduce_async_, hvd.allgather, hvd.alltoall, hvd.reducescatter)
    for call in calls:
        with pytest.raises(TypeError, match=rf"'tensor'.*{type(value).__name__}.*{world.rank}"):
            call(value)
    with pytest.raises(TypeError, match=r"tensors\[1\]"):
        hvd.grouped_allreduce([torch.ones(1), value])
    with pytest.raises(TypeError, match="'tensors'.*sequence"):
        hvd.grouped_allreduce(torch.ones(2))


# -- layouts ------------------------------------------------------------------------------


def _layouts():
    base = torch.arange(2 * 3 * 4 * 5, dtype=torch.float32).reshape(2, 3, 4, 5)
    return {
        "contiguous": base.clone(),
        "transposed": base.clone().transpose(1, 3),
        "channels_last": base.clone().to(memory_format=torch.channels_last),
        "every other": base.clone()[:, ::2],
        "one column": base.clone()[..., 1],
        "flipped order": base.clone().permute(3, 2, 1, 0),
        "unfolded": torch.arange(21.0).as_strided((3, 4), (7, 2)),
        "interleaved": torch.arange(8.0).as_strided((2, 3), (3, 2)),
        "from the middle": torch.arange(30.0)[11:23].view(3, 4),
    }


@pytest.mark.parametrize("name", _layouts())
def test_strides(hvd, world, name):
    factor = sum(rank + 1.0 for rank in world.ranks)
    for form in FORMS:
        mine = _layouts()[name]
        result = mine.clone() * factor
        mine.mul_(world.rank + 1)
        strides = mine.stride()
        is_dense = torch.empty_like(mine).stride() == strides
        reduced = _reduce(hvd, form, mine, op=hvd.Sum)
        assert_close(reduced, result, form)
        if form.endswith("_") or is_dense:
            assert reduced.stride() == strides
    for operation in (hvd.broadcast, hvd.broadcast_):
        mine = _layouts()[name]
        mine.mul_(world.rank + 1)
        assert_close(operation(mine, world.size - 1), _layouts()[name] * world.size)
    mine = _layouts()[name]
    mine.mul_(world.rank + 1)
    gathered = torch.cat([_layouts()[name] * (rank + 1) for rank in world.ranks])
    assert_close(hvd.allgather(mine), gathered)


def test_writing_in_place_leaves_the_gaps_alone(hvd, world):
    base = torch.full((6, 6), 9.0)
    base[::2, ::3] = world.rank
    hvd.allreduce_(base[::2, ::3], op=hvd.Sum)
    result = torch.full((6, 6), 9.0)
    result[::2, ::3] = sum(world.ranks)
    assert_close(base, result)


def test_conjugate_and_negative_bits(hvd, world):
    base = torch.tensor([1 + 2j, 3 - 1j]) * (world.rank + 1)
    total = torch.tensor([1 - 2j, 3 + 1j]) * sum(rank + 1 for rank in world.ranks)
    assert base.conj().is_conj()
    assert_close(hvd.allreduce(base.conj(), op=hvd.Sum).resolve_conj(), total)
    in_place = base.clone().conj()
    hvd.allreduce_(in_place, op=hvd.Sum)
    assert_close(in_place.resolve_conj(), total)
    negative = base.clone().conj().imag
    assert negative.is_neg()
    assert_close(hvd.allreduce(negative, op=hvd.Sum).resolve_neg(), total.imag.contiguous())
    hvd.broadcast_(negative, 0)
    assert_close(negative.resolve_neg(), torch.tensor([-2.0, 1.0]))


def test_expanded_tensors(hvd, world):
    mine = torch.tensor([[world.rank + 1.0]]).expand(3, 4)
    total = torch.full((3, 4), sum(rank + 1.0 for rank in world.ranks))
    assert_close(hvd.allreduce(mine, op=hvd.Sum), total)
    for call in (hvd.allreduce_, lambda t: hvd.broadcast_(t, 0)):
        with pytest.raises(ValueError, match="expanded"):
            call(mine)
    assert_close(hvd.allreduce(torch.ones(1), op=hvd.Sum), torch.tensor([float(world.size)]))


def test_empty_and_scalar_tensors(hvd, world):
    assert hvd.allreduce(torch.empty(0)).shape == (0,)
    assert hvd.allreduce_(torch.empty((3, 0))).shape == (3, 0)
    assert_close(
        hvd.allreduce(torch.tensor(world.rank + 1.0), op=hvd.Max), torch.tensor(float(world.size))
    )
    rows = torch.full((world.rank, 2), float(world.rank))  # rank 0 has none
    assert_close(
        hvd.allgather(rows), torch.cat([torch.full((r, 2), float(r)) for r in world.ranks])
    )
    for call in (hvd.allgather, hvd.alltoall, hvd.reducescatter):
        with pytest.raises(ValueError, match="dimension"):
            call(torch.tensor(1.0))


def test_leaves_that_require_gradients(hvd, world):
    leaf = torch.nn.Parameter(torch.full((3,), world.rank + 1.0))
    hvd.allreduce_(leaf, op=hvd.Sum)
    assert leaf.is_leaf and leaf.requires_grad
    assert_close(leaf.detach(), torch.full((3,), sum(rank + 1.0 for rank in world.ranks)))
    hvd.broadcast_(leaf, 0)
    with torch.no_grad():
        assert not hvd.allreduce(leaf).requires_grad


def test_autograd_notices_writes_in_place(hvd, world):
    leaf = torch.ones(2, requires_grad=True)
    product = leaf * 2
    loss = (product * product).sum()
    hvd.allreduce_(product.detach())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# -- arguments and results ----------------------------------------------------------------


def test_average_and_op(hvd, world):
    mine = torch.tensor([world.rank + 1.0])
    total = sum(rank + 1.0 for rank in world.ranks)
    assert hvd.allreduce(mine).item() == total / world.size
    assert hvd.allreduce(mine, average=True).item() == total / world.size
    assert hvd.allreduce(mine, average=False).item() == total
    assert hvd.allreduce(mine, False).item() == total
    for call in (hvd.allreduce, hvd.allreduce_, hvd.allreduce_async):
        with pytest.raises(ValueError, match="average"):
            call(mine, average=True, op=hvd.Sum)
    scaled = hvd.allreduce(mine, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.25)
    assert scaled.item() == total / 2


def test_groups(hvd, world):
    inputs = [[tensor(r, 5, seed=s) for s in range(3)] for r in world.ranks]
    sums = [wanted([inputs[r][s] for r in world.ranks], "Sum") for s in range(3)]
    mine = inputs[world.rank]
    for results in (
        hvd.grouped_allreduce(mine, op=hvd.Sum),
        hvd.synchronize(hvd.grouped_allreduce_async(mine, op=hvd.Sum)),
        hvd.grouped_allreduce_([t.clone() for t in mine], op=hvd.Sum),
        hvd.synchronize(hvd.grouped_allreduce_async_([t.clone() for t in mine], op=hvd.Sum)),
    ):
        for result, total in zip(results, sums, strict=True):
            assert_close(result, total)
    gathered = hvd.grouped_allgather([mine[0], mine[1].long()])
    assert_close(gathered[0], torch.cat([inputs[r][0] for r in world.ranks]))
    assert_close(gathered[1], torch.cat([inputs[r][1].long() for r in world.ranks]))
    parts = hvd.grouped_reducescatter([mine[2].repeat(world.size)], op=hvd.Sum)
    assert_close(parts[0], sums[2])
    assert hvd.grouped_allreduce([]) == []


def test_alltoall_with_splits(hvd, world):
    # Rank r sends r + s + 1 rows to rank s; their value says from whom and for whom.
    rows = [torch.full((world.rank + s + 1, 2), 10.0 * world.rank + s) for s in world.ranks]
    splits = torch.tensor([len(r) for r in rows], dtype=torch.int32)
    output, received = hvd.alltoall(torch.cat(rows), splits=splits)
    assert received.dtype == torch.int32
    assert received.tolist() == [r + world.rank + 1 for r in world.ranks]
    assert_close(
        output,
        torch.cat(
            [torch.full((r + world.rank + 1, 2), 10.0 * r + world.rank) for r in world.ranks]
        ),
    )
    output, received = hvd.synchronize(hvd.alltoall_async(torch.cat(rows), splits.tolist()))
    assert received.tolist() == [r + world.rank + 1 for r in world.ranks]
    with pytest.raises(ValueError, match="splits"):
        hvd.alltoall(torch.ones(3), splits=[1] * (world.size + 1))
    with pytest.raises(TypeError, match="splits"):
        hvd.alltoall(torch.ones(3), splits=torch.ones(world.size))


@pytest.mark.parametrize("name", ["fp16", "bf16", "none"])
def test_compression(hvd, world, name):
    compression = getattr(hvd.Compression, name)
    mine = tensor(world.rank, (4, 3), torch.float32)
    total = wanted([tensor(rank, (4, 3)) for rank in world.ranks], "Sum")
    result = hvd.allreduce(mine, op=hvd.Sum, compression=compression)
    assert_close(result, total, tolerance=2e-2)
    integers = torch.full((3,), 70_001 + world.rank)
    result = hvd.allreduce(integers, op=hvd.Sum, compression=compression)
    assert result.tolist() == [sum(70_001 + rank for rank in world.ranks)] * 3
    small, _ = compression.compress(mine)
    assert small.element_size() == (4 if name == "none" else 2)
    half = torch.ones(2, dtype=torch.bfloat16)
    assert compression.compress(half)[0] is half


@pytest.mark.parametrize("name", ["fp16", "bf16", "none"])
def test_what_is_cast_on_its_way_is_what_was_meant(hvd, world, name):
    compression = getattr(hvd.Compression, name)
    # Few and many, fused and alone, in one segment of a transport and in several: small
    # integers, of which 16 bits lose nothing.
    shapes = [(3,), (5, 7), (40_000,), (700, 901)]
    everybody = [
        [torch.from_numpy(values(rank, shape)) for shape in shapes] for rank in world.ranks
    ]
    mine = [each.clone() for each in everybody[world.rank]]
    mine[1], mine[3] = mine[1].t(), mine[3].t()  # the elements lie in another order
    before = [each.clone() for each in mine]
    sums = [sum(each) for each in zip(*everybody, strict=True)]
    sums[1], sums[3] = sums[1].t(), sums[3].t()
    doubles = [each.double() for each in mine]
    with torch.inference_mode():
        inferred = hvd.allreduce(mine[0] + 0, op=hvd.Sum, compression=compression)
    for given in (mine, doubles):
        together = hvd.grouped_allreduce(given, op=hvd.Sum, compression=compression)
        apart = [hvd.allreduce(each, op=hvd.Sum, compression=compression) for each in given]
        # Halves of even numbers are exact too.
        means = [
            hvd.allreduce(each * world.size, op=hvd.Average, compression=compression)
            for each in given
        ]
        for results in (together, apart, means):
            for result, source, total in zip(results, given, sums, strict=True):
                assert result.dtype is source.dtype
                assert torch.equal(result.float(), total)
    assert torch.equal(inferred, sums[0])
    for each, old in zip(mine, before, strict=True):
        assert torch.equal(each, old)


def values(rank, shape):
    return np.random.default_rng(rank).integers(-20, 20, shape).astype(np.float32)


def test_sparse_allreduce(hvd, world):
    # Duplicates within a rank, entries shared between ranks, and a rank without any.
    rank = world.rank
    size = world.size
    entries = [[0, 1 + r, 0] if r < size - 1 or size == 1 else [] for r in world.ranks]
    values = [[[1.0, r], [2.0, r], [4.0, r]][: len(entries[r])] for r in world.ranks]

    def sparse(r):
        data = torch.tensor(values[r]).reshape(-1, 2)
        return torch.sparse_coo_tensor(torch.tensor([entries[r]], dtype=torch.int64), data, (6, 2))

    dense = sum(sparse(r).to_dense() for r in world.ranks)
    for op, divisor in ((hvd.Sum, 1), (hvd.Average, size)):
        handle = hvd.sparse_allreduce_async(sparse(rank), name=f"sparse.{op}", op=op)
        result = hvd.synchronize(handle)
        assert result.is_sparse and result.is_coalesced() and hvd.poll(handle)
        assert_close(result.to_dense(), dense / divisor)
        assert handle() is result
    with pytest.raises(TypeError, match="sparse COO"):
        hvd.sparse_allreduce_async(torch.ones(2), "dense", hvd.Sum)


def test_polling_and_barrier(hvd, world):
    handle = hvd.allreduce_async(torch.ones(3), name="polled", op=hvd.Sum)
    hvd.synchronize(handle, timeout=20)
    assert hvd.poll(handle)
    assert hvd.synchronize(handle) is hvd.synchronize(handle)
    hvd.barrier()
    with pytest.raises(TypeError, match="handle"):
        hvd.synchronize("no handle")


def test_names_match_in_any_order(hvd, world):
    names = [f"order.{i}" for i in range(6)]
    order = names if world.rank % 2 == 0 else names[::-1]
    handles = {
        name: hvd.allreduce_async(torch.tensor([float(name[-1])]), name=name, op=hvd.Sum)
        for name in order
    }
    for name, handle in handles.items():
        assert hvd.synchronize(handle).item() == float(name[-1]) * world.size


@pytest.mark.np(3, 4)
def test_process_sets(hvd, world):
    ranks = [0, world.size - 1]
    process_set = hvd.add_process_set(ranks)
    if world.rank in ranks:
        mine = torch.tensor([world.rank + 1.0], requires_grad=True)
        result = hvd.allreduce(mine, op=hvd.Sum, process_set=process_set)
        assert result.item() == world.size + 1
        result.backward()
        assert mine.grad.item() == 2
        gathered = hvd.allgather(torch.tensor([world.rank]), process_set=process_set)
        assert gathered.tolist() == ranks
        root = hvd.broadcast(torch.tensor([world.rank]), world.size - 1, process_set=process_set)
        assert root.item() == world.size - 1
        objects = hvd.allgather_object({"rank": world.rank}, process_set=process_set)
        assert objects == [{"rank": rank} for rank in ranks]
    else:
        with pytest.raises(ValueError, match="not in the process set"):
            hvd.allreduce(torch.ones(1), process_set=process_set)
    hvd.remove_process_set(process_set)


@pytest.mark.np(1)
def test_import_brings_no_other_framework():
    code = (
        "import sys, hvdlite_torch as h; assert 'tensorflow' not in sys.modules; "
        "assert all(hasattr(h, name) for name in h.__all__)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
