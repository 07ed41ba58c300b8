"""Training on shards ends where training on whole batches in one process does."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import hvdlite  # noqa: E402
import hvdlite_torch  # noqa: E402

from .torch_helpers import (  # noqa: E402
    assert_close,
    assert_same_on_all_ranks,
    make_cnn,
    parameters_of,
    train,
)

STEPS = range(20)
OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.05),
}
TOLERANCES = {"float64": 1e-10, "float32": 1e-5}


@pytest.fixture
def hvd(hvd):
    return hvdlite_torch


@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
@pytest.mark.parametrize("dtype_name", TOLERANCES)
@pytest.mark.parametrize("bucket_bytes", [None, 256])
def test_shards_train_like_the_whole(hvd, world, comm, dtype_name, optimizer_name, bucket_bytes):
    dtype = getattr(torch, dtype_name)
    make = OPTIMIZERS[optimizer_name]
    # Only rank 0 begins with the right weights.
    model = make_cnn(dtype, seed=3 + world.rank)
    optimizer = make(model.parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), bucket_bytes=bucket_bytes
    )
    start = parameters_of(model)
    train(model, optimizer, STEPS, world.rank, world.size)

    alone = make_cnn(dtype, seed=3)
    assert torch.equal(start, parameters_of(alone))
    train(alone, make(alone.parameters()), STEPS)
    assert_close(parameters_of(model), parameters_of(alone), tolerance=TOLERANCES[dtype_name])
    assert (parameters_of(alone) - start).abs().max() > 0.01, "nothing was learned"
    assert_same_on_all_ranks(comm, model.parameters())


@pytest.mark.np(1)
def test_one_rank_is_the_plain_framework_bit_for_bit(hvd):
    model, alone = make_cnn(), make_cnn()
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS["AdamW"](model.parameters()), model.named_parameters()
    )
    before = hvd.statistics().responses
    train(model, optimizer, STEPS)
    train(alone, OPTIMIZERS["AdamW"](alone.parameters()), STEPS)
    assert torch.equal(parameters_of(model), parameters_of(alone))
    assert hvd.statistics().responses == before


def test_a_run_repeats_bit_for_bit(hvd, world):
    results = []
    for _ in range(2):
        model = make_cnn()
        optimizer = hvd.DistributedOptimizer(
            OPTIMIZERS["SGD"](model.parameters()), model.named_parameters(), bucket_bytes=500
        )
        train(model, optimizer, range(6), world.rank, world.size)
        results.append(parameters_of(model))
    assert torch.equal(*results)


def test_the_neutral_name_finds_this_adapter(hvd, world, comm):
    model, alone = make_cnn(torch.float64), make_cnn(torch.float64)
    optimizer = hvdlite.DistributedOptimizer(
        OPTIMIZERS["SGD"](model.parameters()), named_parameters=model.named_parameters()
    )
    train(model, optimizer, range(4), world.rank, world.size)
    train(alone, OPTIMIZERS["SGD"](alone.parameters()), range(4))
    assert_close(parameters_of(model), parameters_of(alone), tolerance=1e-10)


def test_compiled_model(hvd, world, comm):
    plain = make_cnn(torch.float64)
    alone = make_cnn(torch.float64)
    # One rank compiles: its parameters have other names.
    model = torch.compile(plain, backend="eager") if world.rank == 0 else plain
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS["SGD"](model.parameters()), model.named_parameters()
    )
    train(model, optimizer, range(4), world.rank, world.size)
    train(alone, OPTIMIZERS["SGD"](alone.parameters()), range(4))
    assert_close(parameters_of(plain), parameters_of(alone), tolerance=1e-10)


@pytest.mark.np(4)
def test_two_halves_train_at_once(hvd, world, comm):
    halves = [hvd.add_process_set([0, 1]), hvd.add_process_set([2, 3])]
    mine = halves[world.rank // 2]
    seed = 20 + world.rank // 2
    model, alone = make_cnn(torch.float64, seed), make_cnn(torch.float64, seed)
    hvd.broadcast_parameters(model.state_dict(), mine.ranks[0], process_set=mine)
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    hvd.broadcast_optimizer_state(optimizer, mine.ranks[0], process_set=mine)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), process_set=mine)
    other = hvd.DistributedOptimizer(
        torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1),
        process_set=halves[1 - world.rank // 2],
    )
    train(model, optimizer, range(5), mine.rank(), 2)
    train(alone, OPTIMIZERS["AdamW"](alone.parameters()), range(5))
    assert_close(parameters_of(model), parameters_of(alone), tolerance=1e-10)
    other.step()  # of a set that this rank is not in: nothing to wait for
    for half in halves:
        hvd.remove_process_set(half)
