"""SyncBatchNorm against plain BatchNorm on the batches of all ranks together in one process."""

from __future__ import annotations

import copy
import io

import pytest

torch = pytest.importorskip("torch")

import hvdlite_torch  # noqa: E402

from .torch_helpers import (  # noqa: E402
    assert_close,
    assert_same_on_all_ranks,
    parameters_of,
    whole_batch,
)

nn = torch.nn
F64 = torch.float64
ROWS = {
    "even": lambda rank: 3,
    "uneven": lambda rank: 2 + rank,
    "empty": lambda rank: 3 * (rank != 1),
}
SHAPES = [(), (5,), (4, 3), (2, 3, 2)]
TOLERANCES = {"float64": 1e-10, "float32": 2e-5, "bfloat16": 3e-2}
PLAIN = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


@pytest.fixture
def hvd(hvd):
    return hvdlite_torch


def _batches(world, rows, shape, dtype=F64, step=0, shift=0.0):
    generator = torch.Generator().manual_seed(50 + step)
    batches = [
        torch.randn((rows(r), 4, *shape), generator=generator, dtype=F64) * (1 + r) + r + shift
        for r in world.ranks
    ]
    return [batch.to(dtype) for batch in batches]


def _weights(x):
    generator = torch.Generator().manual_seed(7)
    return torch.randn(x.shape, generator=generator, dtype=F64).to(x.dtype)


def _set_up(layer):
    with torch.no_grad():
        if layer.affine:
            layer.weight.copy_(torch.linspace(0.5, 2, 4))
            layer.bias.copy_(torch.linspace(-1, 1, 4))
    return layer


def _compare(hvd, world, comm, rows, shape, dtype, tolerance, steps=2, shift=0.0, **options):
    """Run some training steps of both, and compare everything that comes out of them."""
    layer = _set_up(hvd.SyncBatchNorm(4, **options).to(dtype))
    alone = _set_up(PLAIN[len(shape)](4, **options).to(dtype))
    for step in range(steps):
        batches = _batches(world, rows, shape, dtype, step, shift)
        counts = [len(batch) for batch in batches]
        mine = batches[world.rank].clone().requires_grad_()
        whole = torch.cat(batches).requires_grad_()
        weights = _weights(whole)
        output, wanted = layer(mine), alone(whole)
        assert output.dtype == dtype
        assert_close(output, wanted.split(counts)[world.rank], "output", tolerance)
        layer.zero_grad()
        alone.zero_grad()
        (output * weights.split(counts)[world.rank]).square().sum().backward()
        (wanted * weights).square().sum().backward()
        # Relative to the largest: in 16 bits, single elements are anything.
        scale = 1 + whole.grad.abs().max()
        wanted_grad = whole.grad.split(counts)[world.rank]
        assert_close(mine.grad / scale, wanted_grad / scale, "input", tolerance)
        for mine_p, alone_p in zip(layer.parameters(), alone.parameters(), strict=True):
            total = sum(comm.allgather(mine_p.grad.double()))
            scale = 1 + alone_p.grad.double().abs().max()
            assert_close(total / scale, alone_p.grad.double() / scale, "parameter", tolerance)
    for key, value in alone.state_dict().items():
        assert_close(layer.state_dict()[key], value, key, tolerance)
    assert_same_on_all_ranks(comm, layer.buffers())
    return layer, alone


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_is_batch_norm_of_the_whole_batch(hvd, world, comm, rows, shape):
    layer, alone = _compare(hvd, world, comm, ROWS[rows], shape, F64, 1e-10)
    assert layer.num_batches_tracked == 2
    layer.eval()
    alone.eval()
    x = _batches(world, ROWS["even"], shape)[0]
    before = hvd.statistics().responses
    assert_close(layer(x), alone(x), "eval", 1e-10)
    assert hvd.statistics().responses == before, "eval mode is local"


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_every_precision(hvd, world, comm, dtype):
    dtype_, tolerance = getattr(torch, dtype), TOLERANCES[dtype]
    _compare(hvd, world, comm, ROWS["uneven"], (4, 3), dtype_, tolerance, steps=1)


def test_half_inputs_with_full_parameters(hvd, world, comm):
    layer = _set_up(hvd.SyncBatchNorm(4))
    alone = _set_up(nn.BatchNorm2d(4))
    batches = _batches(world, ROWS["uneven"], (4, 3), torch.bfloat16)
    mine = batches[world.rank].clone().requires_grad_()
    output = layer(mine)
    wanted = alone(torch.cat(batches)).split([len(b) for b in batches])[world.rank]
    assert output.dtype == torch.bfloat16
    assert_close(output.float(), wanted.float(), "", 2e-2)
    output.sum().backward()
    assert mine.grad.dtype == torch.bfloat16
    assert layer.weight.grad.dtype == torch.float32


def test_options(hvd, world, comm):
    for options in (
        {"momentum": None},
        {"momentum": 0.3, "eps": 0.1},
        {"affine": False},
        {"track_running_stats": False},
        {"affine": False, "track_running_stats": False},
    ):
        _compare(hvd, world, comm, ROWS["uneven"], (3, 2), F64, 1e-10, steps=3, **options)


def test_a_large_mean_costs_no_digits(hvd, world, comm):
    # E[x^2] - E[x]^2 would have nothing left of a variance of 1 beside a mean of 10^6.
    layer, _ = _compare(
        hvd, world, comm, ROWS["uneven"], (4, 3), F64, 1e-8, shift=1e6, momentum=1.0
    )
    whole = torch.cat(_batches(world, ROWS["uneven"], (4, 3), F64, 1, 1e6))
    exact = (whole - 1e6).transpose(0, 1).flatten(1).var(1)
    assert_close(layer.running_var, exact, "variance", 1e-8)


def test_layouts_and_repeated_use(hvd, world, comm):
    # One layer twice, another one of the same size in between, and channels_last inputs.
    torch.manual_seed(5)
    first, second = hvd.SyncBatchNorm(4).double(), hvd.SyncBatchNorm(4).double()
    plain = nn.BatchNorm2d(4).double(), nn.BatchNorm2d(4).double()
    batches = _batches(world, ROWS["uneven"], (4, 3))
    counts = [len(batch) for batch in batches]
    mine = batches[world.rank].to(memory_format=torch.channels_last).requires_grad_()
    whole = torch.cat(batches).requires_grad_()

    def apply(a, b, x):
        return a(b(a(x)).tanh() * x).exp()

    output, wanted = apply(first, second, mine), apply(*plain, whole)
    assert_close(output, wanted.split(counts)[world.rank].detach(), "", 1e-10)
    output.sum().backward()
    wanted.sum().backward()
    assert_close(mine.grad, whole.grad.split(counts)[world.rank], "", 1e-9)


@pytest.mark.np(2, 3, 4)
def test_takes_one_collective_each_way(hvd, world):
    layer = hvd.SyncBatchNorm(4)
    x = torch.randn(3, 4, requires_grad=True)
    before = hvd.statistics().batches
    output = layer(x)
    assert hvd.statistics().batches - before == 1
    output.square().sum().backward()
    assert hvd.statistics().batches - before == 2


def test_trains_like_the_whole_batch(hvd, world, comm):
    def make():
        torch.manual_seed(11)
        return nn.Sequential(
            nn.Conv2d(1, 4, 3, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Conv2d(4, 5, 3, stride=2),
            nn.BatchNorm2d(5, momentum=None),
            nn.Flatten(),
            nn.Linear(20, 10),
            nn.BatchNorm1d(10, affine=False),
        ).double()

    model = hvd.SyncBatchNorm.convert_sync_batchnorm(make())
    assert sum(isinstance(m, hvd.SyncBatchNorm) for m in model.modules()) == 3
    alone = make()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        model.named_parameters(),
        op=hvd.Sum,
    )
    plain = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    start = parameters_of(alone)
    bounds = [0, 9, 15, 20, 24]  # uneven shards of 24
    ends = [*bounds[: world.size], 24]
    shard = slice(ends[world.rank], ends[world.rank + 1])
    for step in range(6):
        images, labels = whole_batch(step, F64)
        loss = nn.functional.cross_entropy(model(images[shard]), labels[shard], reduction="sum")
        optimizer.zero_grad()
        (loss / 24).backward()
        optimizer.step()
        plain.zero_grad()
        nn.functional.cross_entropy(alone(images), labels).backward()
        plain.step()
    assert_close(parameters_of(model), parameters_of(alone), "weights", 1e-10)
    for key, value in alone.state_dict().items():
        assert_close(model.state_dict()[key], value, key, 1e-10)
    assert_same_on_all_ranks(comm, model.state_dict().values())
    assert (parameters_of(alone) - start).abs().max() > 0.01, "nothing was learned"


def test_conversion_keeps_everything(hvd, world):
    shared = nn.BatchNorm1d(3, eps=0.2, momentum=0.7)
    model = nn.Sequential(nn.Linear(3, 3), shared, nn.ReLU(), shared, nn.InstanceNorm1d(3))
    model[4].eval()
    seen = []
    shared.register_forward_hook(lambda *_: seen.append(1))
    weights = list(model.parameters())
    keys = list(model.state_dict())
    converted = hvd.SyncBatchNorm.convert_sync_batchnorm(model)
    assert converted is model
    assert type(model[1]) is hvd.SyncBatchNorm
    assert model[3] is model[1]
    assert (model[1].eps, model[1].momentum) == (0.2, 0.7)
    assert all(a is b for a, b in zip(model.parameters(), weights, strict=True))
    assert list(model.state_dict()) == keys
    assert type(model[4]) is nn.InstanceNorm1d
    assert not model[4].training
    model[1](torch.randn(4, 3))
    assert seen
    alone = hvd.SyncBatchNorm.convert_sync_batchnorm(nn.SyncBatchNorm(3))
    assert type(alone) is hvd.SyncBatchNorm
    with pytest.raises(ValueError, match="one batch through"):
        hvd.SyncBatchNorm.convert_sync_batchnorm(nn.LazyBatchNorm1d())


def test_copies_and_pickles(hvd, world):
    model = nn.Sequential(hvd.SyncBatchNorm(4).double(), nn.Flatten())
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    x = _batches(world, ROWS["uneven"], ())[world.rank]
    wanted = model(x)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert other[0].process_set is hvd.global_process_set
        assert torch.equal(other(x), wanted)
    plain = nn.Sequential(nn.BatchNorm1d(4).double(), nn.Flatten())
    plain.load_state_dict(model.state_dict())


def test_wrong_inputs(hvd, world, comm):
    layer = hvd.SyncBatchNorm(4)
    with pytest.raises(ValueError, match="at least 2 dimensions"):
        layer(torch.ones(4))
    with pytest.raises(ValueError, match=r"expected 4 channels.*\(2, 3\)"):
        layer(torch.ones(2, 3))
    with pytest.raises(TypeError, match="floating-point"):
        layer(torch.ones(2, 4, dtype=torch.int64))
    if world.size == 1:
        return
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        layer(torch.ones(1 if world.rank == 0 else 0, 4))
    # One value on each of two ranks is two values.
    layer(torch.randn(1, 4))
    with pytest.raises(hvd.MismatchError):
        wide = world.rank + 1
        hvd.SyncBatchNorm(wide)(torch.ones(2, wide))
    assert layer(torch.ones(0, 4)).shape == (0, 4)


@pytest.mark.np(4)
def test_within_process_sets(hvd, world, comm):
    halves = [hvd.add_process_set([0, 1]), hvd.add_process_set([2, 3])]
    mine = halves[world.rank // 2]
    layer = hvd.SyncBatchNorm(4, process_set=mine).double()
    batches = _batches(world, ROWS["uneven"], (3,))
    start = world.rank // 2 * 2
    pair = batches[start : start + 2]
    wanted = nn.BatchNorm1d(4).double()(torch.cat(pair)).split([len(b) for b in pair])
    output = copy.deepcopy(layer)(batches[world.rank])
    assert_close(output, wanted[world.rank - start], "", 1e-10)
    with pytest.raises(ValueError, match="not in"):
        hvd.SyncBatchNorm(4, process_set=halves[1 - world.rank // 2])(batches[world.rank])
    for half in halves:
        hvd.remove_process_set(half)
