"""Adasum against its definition by plain recursion, and optimizers that use it."""

from __future__ import annotations

import copy
import io

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import hvdlite_torch  # noqa: E402

from .torch_helpers import (  # noqa: E402
    Branches,
    assert_close,
    assert_same_on_all_ranks,
    inputs_of,
    make_adamw,
    make_cnn,
    parameters_of,
    whole_batch,
)

nn = torch.nn
F64 = torch.float64


@pytest.fixture
def torch_hvd(hvd):
    return hvdlite_torch


def adasum(vectors):
    if len(vectors) == 1:
        return vectors[0]
    half = 1
    while 2 * half < len(vectors):
        half *= 2
    a, b = adasum(vectors[:half]), adasum(vectors[half:])
    aa, bb, ab = (a * a).sum(), (b * b).sum(), (a * b).sum()
    return (1 - ab / (2 * aa) if aa else 1) * a + (1 - ab / (2 * bb) if bb else 1) * b


def _vector(rank, shape, seed=0):
    return np.random.default_rng(10 * seed + rank).normal(size=shape) + np.arange(shape[-1])


# -- the operation --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_allreduce(hvd, world, comm, dtype):
    tolerance = {"float16": 2e-3, "float32": 1e-5, "float64": 1e-12}[dtype]
    inputs = [_vector(r, (7, 5)).astype(dtype) for r in world.ranks]
    wanted = adasum([array.astype(np.float64) for array in inputs])
    for scale in (1.0, 0.5):
        result = hvd.allreduce(inputs[world.rank], op=hvd.Adasum, postscale_factor=scale)
        assert result.dtype == dtype
        np.testing.assert_allclose(result, scale * wanted, rtol=tolerance, atol=tolerance)
        assert len(set(comm.allgather(result.tobytes()))) == 1
    # It doesn't depend on the length of the vectors.
    result = hvd.allreduce(inputs[world.rank], op=hvd.Adasum, prescale_factor=4.0)
    np.testing.assert_allclose(result, 4 * wanted, rtol=tolerance, atol=8 * tolerance)


def test_groups_and_fusion_keep_tensors_apart(hvd, world):
    shapes = [(3,), (1,), (40, 5), (0,), (2, 2, 2)]
    inputs = [
        [_vector(r, s, i) if 0 not in s else np.zeros(s) for i, s in enumerate(shapes)]
        for r in world.ranks
    ]
    wanted = [adasum(list(parts)) for parts in zip(*inputs, strict=True)]
    results = hvd.grouped_allreduce(inputs[world.rank], op=hvd.Adasum)
    handles = [
        hvd.allreduce_async(array, name=f"adasum.{i}", op=hvd.Adasum)
        for i, array in enumerate(inputs[world.rank])
    ]
    singles = [hvd.synchronize(handle) for handle in handles]
    for result, single, value in zip(results, singles, wanted, strict=True):
        np.testing.assert_allclose(result, value, rtol=1e-12)
        np.testing.assert_allclose(single, value, rtol=1e-12)


def test_other_elements_are_refused(hvd, torch_hvd, world):
    for dtype in ("bool", "uint8", "int32", "int64", "complex64"):
        with pytest.raises(TypeError, match=f"real floating-point numbers, not for {dtype}"):
            hvd.allreduce(np.ones(3, dtype), op=hvd.Adasum)
        with pytest.raises(TypeError, match="real floating-point"):
            torch_hvd.allreduce(torch.ones(3, dtype=getattr(torch, dtype)), op=hvd.Adasum)
    with pytest.raises(ValueError, match="whole tensors; use allreduce"):
        hvd.reducescatter(np.ones(4), op=hvd.Adasum)
    np.testing.assert_allclose(hvd.allreduce(np.ones(3), op=hvd.Adasum), 1)


def test_torch_tensors(torch_hvd, world, comm):
    hvd = torch_hvd
    inputs = [torch.from_numpy(_vector(r, (6, 4))) for r in world.ranks]
    wanted = torch.as_tensor(adasum([t.numpy() for t in inputs]))
    mine = inputs[world.rank]
    assert_close(hvd.allreduce(mine, op=hvd.Adasum), wanted, "", 1e-12)
    assert_close(hvd.allreduce(mine.t(), op=hvd.Adasum), wanted.t(), "", 1e-12)
    assert_close(hvd.allreduce_(mine.clone(), op=hvd.Adasum), wanted, "", 1e-12)
    rounded = hvd.allreduce(mine.bfloat16(), op=hvd.Adasum)
    exact = adasum([t.bfloat16().double().numpy() for t in inputs])
    assert_close(rounded.double(), torch.as_tensor(exact), "", 1e-2)
    assert_same_on_all_ranks(comm, [rounded])


def test_many_at_once_beside_other_operations(hvd, world):
    rng = np.random.default_rng(3)
    data = rng.normal(size=(world.size, 12, 300))
    handles = []
    for i in range(12):
        array = data[world.rank, i]
        handles.append(hvd.allreduce_async(array, name=f"mix.a.{i}", op=hvd.Adasum))
        handles.append(hvd.allreduce_async(array, name=f"mix.s.{i}", op=hvd.Sum))
        handles.append(hvd.allgather_async(array, name=f"mix.g.{i}"))
    for i in range(12):
        a, s, g = (hvd.synchronize(handle) for handle in handles[3 * i : 3 * i + 3])
        np.testing.assert_allclose(a, adasum(list(data[:, i])), rtol=1e-9)
        np.testing.assert_allclose(s, data[:, i].sum(0), rtol=1e-9)
        np.testing.assert_array_equal(g, data[:, i].reshape(-1))


@pytest.mark.np(2, 3, 4)
def test_a_rank_that_has_joined_adds_nothing(hvd, world):
    if world.rank:
        result = hvd.allreduce(_vector(world.rank, (5,)), name="rest", op=hvd.Adasum)
        rest = [np.zeros(5), *(_vector(r, (5,)) for r in world.ranks[1:])]
        np.testing.assert_allclose(result, adasum(rest), rtol=1e-12)
    hvd.join()


@pytest.mark.np(3, 4)
def test_process_sets(hvd, world):
    part = hvd.add_process_set([0, world.size - 1])
    if part.included():
        result = hvd.allreduce(_vector(world.rank, (9,)), op=hvd.Adasum, process_set=part)
        pair = [_vector(0, (9,)), _vector(world.size - 1, (9,))]
        np.testing.assert_allclose(result, adasum(pair), rtol=1e-12)
    hvd.remove_process_set(part)


# -- optimizers -----------------------------------------------------------------------------


def simulate(make_model, make_optimizer, loss, steps, size):
    """Step every rank's copy by itself, and move all of them by the Adasum of their steps."""
    models = [make_model() for _ in range(size)]
    optimizers = [make_optimizer(model) for model in models]
    for step in range(steps):
        starts = [[p.detach().clone() for p in model.parameters()] for model in models]
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            _step(model, optimizer, loss, step, rank)
        for i, start in enumerate(starts[0]):
            steps_of_ranks = [
                list(model.parameters())[i].detach().double().numpy() - start.double().numpy()
                for model in models
            ]
            total = torch.as_tensor(adasum(steps_of_ranks)).to(start.dtype)
            with torch.no_grad():
                for model in models:
                    list(model.parameters())[i].copy_(start + total)
    return models[0]


def _step(model, optimizer, loss, step, rank):
    def closure():
        optimizer.zero_grad()
        value = loss(model, step, rank)
        value.backward()
        return value

    if isinstance(optimizer, torch.optim.LBFGS):
        optimizer.step(closure)
    else:
        closure()
        optimizer.step()


def _cnn_loss(model, step, rank):
    images, labels = whole_batch(step + 10 * rank, next(model.parameters()).dtype, 8)
    return nn.functional.cross_entropy(model(images), labels)


OPTIMIZERS = {
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9),
    "AdamW": make_adamw,
    "LBFGS": lambda m: torch.optim.LBFGS(m.parameters(), lr=0.1, max_iter=3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_combined(torch_hvd, world, comm, name):
    hvd = torch_hvd
    model = make_cnn(F64)
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS[name](model), model.named_parameters(), op=hvd.Adasum
    )
    for step in range(4):
        _step(model, optimizer, _cnn_loss, step, world.rank)
    alone = simulate(lambda: make_cnn(F64), OPTIMIZERS[name], _cnn_loss, 4, world.size)
    assert_close(parameters_of(model), parameters_of(alone), name, 1e-9)
    assert_same_on_all_ranks(comm, model.parameters())
    start = parameters_of(make_cnn(F64))
    assert (parameters_of(model) - start).abs().max() > 1e-3, "nothing was learned"


def test_branches_and_parameters_that_nobody_uses(torch_hvd, world, comm):
    hvd = torch_hvd

    def loss(model, step, rank):
        return model(inputs_of(step, rank), "a" if rank % 2 else "b").square().sum()

    model = Branches()
    unused = parameters_of(model.unused)
    optimizer = hvd.DistributedOptimizer(make_adamw(model), model.named_parameters(), op=hvd.Adasum)
    for step in range(4):
        _step(model, optimizer, loss, step, world.rank)
    alone = simulate(Branches, make_adamw, loss, 4, world.size)
    assert_close(parameters_of(model), parameters_of(alone), "", 1e-10)
    assert torch.equal(parameters_of(model.unused), unused)
    assert all(p.grad is None for p in model.unused.parameters())
    assert_same_on_all_ranks(comm, model.parameters())


def test_the_optimizer_stays_what_it_is(torch_hvd, world, comm):
    hvd = torch_hvd
    model = make_cnn(F64)
    seen = []
    plain = make_adamw(model)
    plain.register_step_post_hook(lambda *_: seen.append(parameters_of(model)))
    optimizer = hvd.DistributedOptimizer(
        plain, model.named_parameters(), op=hvd.Adasum, backward_passes_per_step=2
    )
    assert optimizer is plain
    _cnn_loss(model, 0, world.rank).backward()
    _cnn_loss(model, 1, world.rank).backward()
    optimizer.synchronize()
    with optimizer.skip_synchronize():
        optimizer.step()
    assert torch.equal(seen[0], parameters_of(model)), "hooks see combined steps"
    optimizer.zero_grad()
    optimizer.set_backward_passes_per_step(1)
    with pytest.raises(ValueError, match="at least 1"):
        optimizer.set_backward_passes_per_step(0)
    for wrong in (1.5, "2", True, None):
        with pytest.raises(TypeError, match="passes"):
            optimizer.set_backward_passes_per_step(wrong)
    with pytest.raises(ValueError, match="op=Average only"):
        hvd.DistributedOptimizer(
            make_adamw(make_cnn()), op=hvd.Adasum, gradient_predivide_factor=2.0
        )
    # Copies are distributed too.
    file = io.BytesIO()
    torch.save({"model": model, "optimizer": optimizer}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=False)
    model_2, optimizer_2 = copy.deepcopy((model, optimizer))
    for m, o in ((model, optimizer), (model_2, optimizer_2), (saved["model"], saved["optimizer"])):
        _step(m, o, _cnn_loss, 3, world.rank)
        assert_same_on_all_ranks(comm, m.parameters())
        assert torch.equal(parameters_of(m), parameters_of(model))


def test_infinities_on_one_rank_do_not_stop_the_others(torch_hvd, world, comm):
    hvd = torch_hvd
    model = nn.Linear(3, 2)
    torch.manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.linspace(-1, 1, p.numel()).view(p.shape))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.5), model.named_parameters(), op=hvd.Adasum
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    x = torch.tensor([[1.0, 2.0, 3.0]]) * (world.rank + 1)
    bad = world.size - 1
    before = model.weight.detach().clone()
    for step in range(2):
        optimizer.zero_grad()
        factor = float("inf") if step == 0 and world.rank == bad else 1.0
        scaler.scale((model(x) * factor).sum()).backward()
        if step:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 100.0)
        scaler.step(optimizer)
        scaler.update()
        assert_same_on_all_ranks(comm, model.parameters())
        if step == 0:
            steps = [-0.5 * np.array([[1.0, 2, 3]] * 2) * (r + 1) * (r != bad) for r in world.ranks]
            wanted = before + torch.as_tensor(adasum(steps)).float()
            assert_close(model.weight.detach(), wanted, "", 1e-5)
    assert scaler.get_scale() == (2.0 if world.rank == bad else 4.0)
    optimizer.step()
    assert_same_on_all_ranks(comm, model.parameters())


def test_compressed_steps(torch_hvd, world, comm):
    hvd = torch_hvd
    model = make_cnn()
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS["SGD"](model), model.named_parameters(), hvd.Compression.bf16, op=hvd.Adasum
    )
    for step in range(3):
        _step(model, optimizer, _cnn_loss, step, world.rank)
    alone = simulate(make_cnn, OPTIMIZERS["SGD"], _cnn_loss, 3, world.size)
    assert_close(parameters_of(model), parameters_of(alone), "", 1e-2)
    assert_same_on_all_ranks(comm, model.parameters())
