"""Ranks that disagree, names in flight, and many tensors at once (B19, B21, B26)."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import hvdlite_torch  # noqa: E402

from .torch_helpers import assert_close  # noqa: E402


@pytest.fixture
def hvd(hvd):
    return hvdlite_torch


MISMATCHES = {
    "dtype": (
        lambda hvd, name: hvd.allreduce(torch.ones(2, 3).double(), name=name),
        lambda hvd, name: hvd.allreduce(torch.ones(2, 3), name=name),
        ("float64", "float32"),
    ),
    "sixteen bits": (
        lambda hvd, name: hvd.allreduce(torch.ones(2).bfloat16(), name=name),
        lambda hvd, name: hvd.allreduce(torch.ones(2).half(), name=name),
        ("bfloat16", "float16"),
    ),
    "shape": (
        lambda hvd, name: hvd.allreduce(torch.ones(3, 2), name=name),
        lambda hvd, name: hvd.allreduce(torch.ones(2, 3), name=name),
        ("3, 2", "2, 3"),
    ),
    "operation": (
        lambda hvd, name: hvd.broadcast(torch.ones(2), 0, name=name),
        lambda hvd, name: hvd.allreduce(torch.ones(2), name=name),
        ("broadcast", "allreduce"),
    ),
    "reduce op": (
        lambda hvd, name: hvd.allreduce(torch.ones(2), op=hvd.Max, name=name),
        lambda hvd, name: hvd.allreduce(torch.ones(2), op=hvd.Sum, name=name),
        ("Max", "Sum"),
    ),
    "scale": (
        lambda hvd, name: hvd.allreduce_(torch.ones(2), prescale_factor=0.5, name=name),
        lambda hvd, name: hvd.allreduce_(torch.ones(2), name=name),
        ("0.5", "1"),
    ),
    "root": (
        lambda hvd, name: hvd.broadcast_(torch.ones(2), 1, name=name),
        lambda hvd, name: hvd.broadcast_(torch.ones(2), 0, name=name),
        ("1", "0"),
    ),
}


@pytest.mark.np(2, 3)
@pytest.mark.parametrize("case", MISMATCHES)
def test_mismatch(hvd, world, comm, case):
    odd, others, words = MISMATCHES[case]
    with pytest.raises(hvd.MismatchError, match="^Mismatched ") as caught:
        (odd if world.rank == 1 else others)(hvd, f"mismatch {case}")
    text = str(caught.value)
    assert all(word in text for word in words) and "rank" in text
    assert len(set(comm.allgather(text))) == 1
    assert_close(hvd.allreduce(torch.ones(2), op=hvd.Sum), torch.full((2,), float(world.size)))


@pytest.mark.np(2, 3)
def test_same_name_twice_in_flight(hvd, world, comm):
    handle = None
    if world.rank == 0:
        handle = hvd.allreduce_async(torch.ones(2), name="twice", op=hvd.Sum)
        with pytest.raises(hvd.DuplicateNameError, match="same name"):
            hvd.allreduce_async(torch.ones(2), name="twice", op=hvd.Sum)
    comm.barrier()
    if world.rank != 0:
        handle = hvd.allreduce_async(torch.ones(2), name="twice", op=hvd.Sum)
    assert_close(hvd.synchronize(handle), torch.full((2,), float(world.size)))


@pytest.mark.np(2)
def test_many_sizes_with_and_without_fusion(hvd, world, monkeypatch):
    # B26: 300 tensors; how they share buffers must not show in a single bit.
    generator = torch.Generator().manual_seed(26)
    sizes = torch.randint(1, 400, (300,), generator=generator).tolist()
    sizes[7] = 5001

    def mine(rank):
        seeded = torch.Generator().manual_seed(rank)
        return [torch.randn(size, generator=seeded) for size in sizes]

    sums = [a + b for a, b in zip(mine(0), mine(1), strict=True)]
    for threshold in (0, 1, sum(sizes[:10]) * 4, 4 * 5000, 64 << 20):
        hvd.shutdown()
        monkeypatch.setenv("HVDLITE_FUSION_THRESHOLD", str(threshold))
        hvd.init()
        for _ in range(2):
            handles = [
                hvd.allreduce_async_(t, name=f"t{i}", op=hvd.Sum)
                for i, t in enumerate(mine(world.rank))
            ]
            for handle, total in zip(handles, sums, strict=True):
                assert torch.equal(hvd.synchronize(handle), total)
    hvd.shutdown()
    monkeypatch.undo()
    hvd.init()
