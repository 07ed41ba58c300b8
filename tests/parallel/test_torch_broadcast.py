"""Parameters and optimizer state of one rank on all (B4, B5, B43)."""

from __future__ import annotations

import copy
import pickle

import pytest

torch = pytest.importorskip("torch")

import hvdlite_torch  # noqa: E402

from .torch_helpers import (  # noqa: E402
    assert_close,
    assert_same_on_all_ranks,
    make_cnn,
    parameters_of,
    train,
)


@pytest.fixture
def hvd(hvd):
    return hvdlite_torch


# -- parameters ---------------------------------------------------------------------------


def _state(rank):
    return {
        "weight": torch.full((3, 2), float(rank)),
        "count": torch.tensor(rank + 5),
        "mask": torch.tensor([rank == 0, rank != 0]),
        "half": torch.full((2, 2), rank + 0.5, dtype=torch.bfloat16),
        "conv": torch.full((2, 3, 2, 2), float(rank)).to(memory_format=torch.channels_last),
        "empty": torch.empty(0),
        "columns": torch.arange(12.0).view(3, 4)[:, rank % 2 :: 2],
    }


@pytest.mark.parametrize("form", ["dict", "list", "pairs", "pairs as generator", "tensors"])
def test_forms(hvd, world, form):
    root = world.size - 1
    state = _state(world.rank)
    params = {
        "dict": state,
        "list": list(state.values()),
        "pairs": list(state.items()),
        "pairs as generator": ((name, value) for name, value in state.items()),
        "tensors": (value for value in state.values()),
    }[form]
    strides = {name: value.stride() for name, value in state.items()}
    hvd.broadcast_parameters(params, root_rank=root)
    for name, value in _state(root).items():
        assert_close(state[name], value, name)
        assert state[name].stride() == strides[name]


def test_none_and_order(hvd, world):
    state = {**_state(world.rank), "nothing": None}
    if world.rank == world.size - 1:
        state = dict(reversed(state.items()))
    hvd.broadcast_parameters(state, 0)
    for name, value in _state(0).items():
        assert_close(state[name], value, name)
    hvd.broadcast_parameters([None, torch.ones(1)], 0)
    hvd.broadcast_parameters([], 0)
    hvd.broadcast_parameters({}, 0)


def test_a_model_and_its_wrappers(hvd, world):
    torch.manual_seed(world.rank)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    model[1].num_batches_tracked.fill_(world.rank)
    torch.manual_seed(0)
    first = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    names = {0: "", 1: "module.", 2: "_orig_mod.", 3: "module._orig_mod."}
    prefix = names[world.rank]
    hvd.broadcast_parameters({prefix + k: v for k, v in model.state_dict().items()}, 0)
    for mine, theirs in zip(model.state_dict().values(), first.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)


def test_shared_tensors_are_sent_once(hvd, world):
    tied = torch.full((1000,), float(world.rank))
    before = hvd.statistics().bytes
    hvd.broadcast_parameters({"a": tied, "b": tied, "c": tied[:]}, 0)
    assert_close(tied, torch.zeros(1000))
    assert hvd.statistics().bytes - before < 2 * tied.nbytes
    expanded = torch.full((1,), world.rank + 7.0).expand(5)
    hvd.broadcast_parameters([expanded], 0)
    assert_close(expanded, torch.full((5,), 7.0))


def test_many_tensors_take_few_requests(hvd, world):
    tensors = [torch.full((11,), float(world.rank + i)) for i in range(300)]
    before = hvd.statistics().responses
    hvd.broadcast_parameters(tensors, 0)
    assert hvd.statistics().responses - before <= 3
    for i, tensor in enumerate(tensors):
        assert_close(tensor, torch.full((11,), float(i)))


@pytest.mark.parametrize(
    "params", [{"x": 3}, {"x": "text"}, [1.0], {1: torch.ones(1)}, torch.ones(3), 5]
)
def test_other_things_are_refused(hvd, world, params):
    with pytest.raises(TypeError, match="broadcast_parameters"):
        hvd.broadcast_parameters(params, 0)
    hvd.broadcast_parameters([torch.ones(1)], 0)


@pytest.mark.np(2, 3)
@pytest.mark.parametrize(
    "odd, words",
    [
        ({"a": torch.ones(2), "c": torch.ones(3)}, ("'b: float32 \\(3,\\)'", "'c: ")),
        ({"a": torch.ones(2), "b": torch.ones(4)}, ("\\(3,\\)", "\\(4,\\)")),
        ({"a": torch.ones(2)}, ("'b: float32",)),
        ({"a": torch.ones(2).double(), "b": torch.ones(3)}, ("float32", "float64")),
    ],
)
def test_mismatch(hvd, world, odd, words):
    params = odd if world.rank == 1 else {"a": torch.ones(2), "b": torch.ones(3)}
    for word in words:
        with pytest.raises(hvd.MismatchError, match=f"^Mismatched .*rank.*{word}"):
            hvd.broadcast_parameters(params, 0)
    hvd.broadcast_parameters([torch.ones(1)], 0)


# -- optimizer state ----------------------------------------------------------------------

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.8, 0.99)),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, foreach=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), foreach=False),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.5, max_iter=3, history_size=4),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
}


def _advance(model, optimizer, steps=3):
    for step in range(steps):
        torch.manual_seed(step)
        inputs = torch.randn(6, 1, 8, 8)

        def closure(inputs=inputs):
            optimizer.zero_grad()
            loss = model(inputs).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)


def _tensors(value):
    """All tensors of a nest, and the rest of it, in a fixed order."""
    if isinstance(value, torch.Tensor):
        return [value], "tensor"
    if isinstance(value, dict):
        pairs = [(key, _tensors(item)) for key, item in value.items()]
        return [t for _, (ts, _) in pairs for t in ts], [(k, rest) for k, (_, rest) in pairs]
    if isinstance(value, (list, tuple)):
        items = [_tensors(item) for item in value]
        return [t for ts, _ in items for t in ts], (type(value).__name__, [r for _, r in items])
    return [], (type(value).__name__, value)


def _assert_same_state(comm, optimizer):
    tensors, rest = _tensors(optimizer.state_dict())
    assert_same_on_all_ranks(comm, tensors)
    others = comm.allgather(rest)
    assert all(other == others[0] for other in others)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("wrapped", [False, True])
def test_resume_where_only_the_root_has_state(hvd, world, comm, name, wrapped):
    root = world.size - 1
    model = make_cnn(seed=world.rank)
    optimizer = OPTIMIZERS[name](model.parameters())
    if world.rank == root:
        _advance(model, optimizer)
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
    if wrapped:
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    weights = parameters_of(model)
    before = copy.deepcopy(optimizer.state_dict())
    hvd.broadcast_optimizer_state(optimizer, root_rank=root)
    assert torch.equal(parameters_of(model), weights)
    hvd.broadcast_parameters(model.state_dict(), root_rank=root)
    if world.rank == root:
        for mine, old in zip(_tensors(optimizer.state_dict())[0], _tensors(before)[0], strict=True):
            assert torch.equal(mine, old)
    _assert_same_state(comm, optimizer)
    assert_same_on_all_ranks(comm, model.parameters())
    # From here on all are the same optimizer: the same data make the same steps.
    _advance(model, optimizer, 2)
    _assert_same_state(comm, optimizer)
    assert_same_on_all_ranks(comm, model.parameters())
    alone = make_cnn(seed=root)
    plain = OPTIMIZERS[name](alone.parameters())
    _advance(alone, plain)
    for group in plain.param_groups:
        group["lr"] *= 0.5
    _advance(alone, plain, 2)
    assert_close(parameters_of(model), parameters_of(alone), tolerance=1e-4 if wrapped else 1e-6)


@pytest.mark.parametrize("name", ["SGD", "AdamW", "LBFGS", "tensor lr"])
def test_a_fresh_optimizer_is_not_touched(hvd, world, name):
    model = make_cnn()
    optimizer = OPTIMIZERS[name](model.parameters())
    weights, state = parameters_of(model), copy.deepcopy(optimizer.state_dict())
    steps = []
    optimizer.register_step_pre_hook(lambda *_: steps.append(1))
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert not steps
    assert torch.equal(parameters_of(model), weights)
    assert all(p.grad is None for p in model.parameters())
    assert optimizer.state_dict()["state"] == state["state"] or name == "LBFGS"
    assert optimizer.state_dict()["param_groups"] == state["param_groups"]


def test_options_and_their_types(hvd, world):
    model = make_cnn()
    first, *rest = model.parameters()
    rest[0].requires_grad_(False)
    is_root = world.rank == 0
    optimizer = torch.optim.AdamW(
        [
            {"params": [first], "lr": torch.tensor(0.25) if is_root else torch.tensor(0.5)},
            {"params": rest, "betas": (0.7, 0.8) if is_root else (0.1, 0.2)},
        ],
        lr=0.125 if is_root else 1,
        weight_decay=0.01 * (world.rank + 1),
    )
    optimizer.param_groups[1]["extra"] = {"note": "of the root"} if is_root else None
    hvd.broadcast_optimizer_state(optimizer, 0)
    one, two = optimizer.param_groups
    assert isinstance(one["lr"], torch.Tensor) and one["lr"].item() == 0.25
    assert type(two["lr"]) is float and two["lr"] == 0.125
    assert two["betas"] == (0.7, 0.8) and one["weight_decay"] == 0.01
    assert two["extra"] == {"note": "of the root"}


def test_state_of_some_parameters_only(hvd, world, comm):
    model = make_cnn(seed=1)
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    if world.rank == 0:
        optimizer.state[parameters[1]]["momentum_buffer"] = None
        optimizer.state[parameters[2]]["momentum_buffer"] = torch.full_like(parameters[2], 0.5)
    else:
        optimizer.state[parameters[0]]["momentum_buffer"] = torch.ones_like(parameters[0])
    hvd.broadcast_optimizer_state(optimizer, 0)
    assert set(optimizer.state) == {parameters[1], parameters[2]}
    assert optimizer.state[parameters[1]]["momentum_buffer"] is None
    _assert_same_state(comm, optimizer)


def test_state_of_another_type_than_its_parameter(hvd, world, comm):
    parameter = torch.nn.Parameter(torch.ones(2, 3, 2, 2, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    if world.rank == 0:
        master = torch.full((2, 3, 2, 2), 1 / 3).to(memory_format=torch.channels_last)
        optimizer.state[parameter] = {"master": master, "same": master, "step": torch.tensor(7)}
    hvd.broadcast_optimizer_state(optimizer, 0)
    state = optimizer.state[parameter]
    assert state["master"].dtype == torch.float32 and state["same"] is state["master"]
    assert state["master"].is_contiguous(memory_format=torch.channels_last)
    assert_close(state["master"], torch.full((2, 3, 2, 2), 1 / 3))
    assert state["step"].dtype == torch.int64 and state["step"].item() == 7


@pytest.mark.np(2, 3)
def test_different_optimizers(hvd, world, comm):
    model = make_cnn()
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters[: 3 if world.rank == 1 else None], lr=0.1)
    with pytest.raises(hvd.MismatchError, match="^Mismatched .*rank 0.*rank 1"):
        hvd.broadcast_optimizer_state(optimizer, 0)
    kind = torch.optim.Adam if world.rank == 1 else torch.optim.SGD
    with pytest.raises(hvd.MismatchError, match="SGD.*Adam"):
        hvd.broadcast_optimizer_state(kind(parameters, lr=0.1), 0)
    hvd.broadcast_optimizer_state(torch.optim.SGD(parameters, lr=0.1), 0)


@pytest.mark.np(2)
def test_what_cannot_be_sent_fails_everywhere(hvd, world):
    model = make_cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = next(model.parameters())
    optimizer.state[first]["sparse"] = torch.ones(3).to_sparse()
    with pytest.raises(TypeError, match="optimizer.state"):
        hvd.broadcast_optimizer_state(optimizer, 0)
    optimizer.state[first] = {"function": lambda: 0}
    with pytest.raises((pickle.PicklingError, AttributeError, RuntimeError), match="pickle"):
        hvd.broadcast_optimizer_state(optimizer, 0)
    with pytest.raises(TypeError, match="optimizer"):
        hvd.broadcast_optimizer_state(model, 0)
    train(model, hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1)), [0])


# -- objects ------------------------------------------------------------------------------


def test_objects(hvd, world):
    mine = {"rank": world.rank, "tensor": torch.full((2,), float(world.rank))}
    theirs = hvd.broadcast_object(mine, root_rank=world.size - 1, name="object")
    assert theirs["rank"] == world.size - 1
    assert_close(theirs["tensor"], torch.full((2,), world.size - 1.0))
    everybody = hvd.allgather_object(mine, name="objects")
    assert [item["rank"] for item in everybody] == list(world.ranks)
