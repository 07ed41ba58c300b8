"""Arguments that don't fit are refused at once, with the argument, its value and the rank."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import hvdlite_torch  # noqa: E402

from .torch_helpers import Branches, assert_close, make_sgd  # noqa: E402

nn = torch.nn
NAN, INF = float("nan"), float("inf")


@pytest.fixture
def hvd(hvd):
    return hvdlite_torch


OPTIMIZER_ARGUMENTS = [
    ("compression", "fp16", TypeError),
    ("compression", object(), TypeError),
    ("compression", None, TypeError),
    ("gradient_predivide_factor", NAN, ValueError),
    ("gradient_predivide_factor", INF, ValueError),
    ("gradient_predivide_factor", 0, ValueError),
    ("gradient_predivide_factor", -2.0, ValueError),
    ("gradient_predivide_factor", "2", TypeError),
    ("gradient_predivide_factor", None, TypeError),
    ("gradient_predivide_factor", True, TypeError),
    ("gradient_predivide_factor", [2.0], TypeError),
    ("bucket_bytes", -1, ValueError),
    ("bucket_bytes", 0, ValueError),
    ("bucket_bytes", "1", TypeError),
    ("bucket_bytes", 1e6, TypeError),
    ("bucket_bytes", True, TypeError),
    ("backward_passes_per_step", 1.5, TypeError),
    ("backward_passes_per_step", 2.0, TypeError),
    ("backward_passes_per_step", "2", TypeError),
    ("backward_passes_per_step", True, TypeError),
    ("backward_passes_per_step", None, TypeError),
    ("backward_passes_per_step", 0, ValueError),
    ("backward_passes_per_step", -1, ValueError),
    ("process_set", None, TypeError),
    ("process_set", [0], TypeError),
    ("process_set", 0, TypeError),
    ("num_groups", -1, ValueError),
    ("num_groups", 1000, ValueError),
    ("num_groups", "2", TypeError),
    ("num_groups", 1.0, TypeError),
    ("groups", -1, ValueError),
    ("groups", 1000, ValueError),
    ("groups", "ab", ValueError),
    ("groups", True, ValueError),
    ("groups", [torch.ones(1)], ValueError),
    ("groups", [["weight"]], ValueError),
    ("groups", [[nn.Parameter(torch.ones(77))]], ValueError),
    ("op", True, TypeError),
    ("op", "sum", ValueError),
    ("op", hvdlite_torch.Max, ValueError),
    ("named_parameters", 3, TypeError),
    ("named_parameters", "weight", TypeError),
]


@pytest.mark.np(1, 2)
def test_arguments_of_the_optimizer(hvd, world):
    for argument, value, error in OPTIMIZER_ARGUMENTS:
        model = Branches()
        optimizer = make_sgd(model)
        with pytest.raises(error) as caught:
            hvd.DistributedOptimizer(optimizer, **{argument: value})
        text = str(caught.value)
        assert argument in text, text
        if argument not in ("op", "named_parameters"):
            assert f"rank {world.rank}" in text, text
        # Nothing has been done to the optimizer: it can be wrapped properly.
        hvd.DistributedOptimizer(optimizer, model.named_parameters())


@pytest.mark.np(1, 2)
def test_groups_with_parameters_that_occur_twice(hvd, world):
    model = Branches()
    weight = model.a.weight
    for groups in ([[weight, weight]], [[weight], [model.b[0].weight, weight]]):
        with pytest.raises(ValueError, match=rf"groups\[.*groups\[0\] already.*rank {world.rank}"):
            hvd.DistributedOptimizer(make_sgd(model), groups=groups)
    with pytest.raises(ValueError, match="both"):
        hvd.DistributedOptimizer(make_sgd(model), groups=[[weight]], num_groups=2)


@pytest.mark.np(1, 2)
def test_arguments_that_look_odd_and_are_right(hvd, world):
    class Own:
        """A compressor by its methods, as an object and not a class."""

        def compress(self, tensor):
            return tensor, None

        def decompress(self, tensor, ctx):
            return tensor

    right = [
        ("compression", Own()),
        ("gradient_predivide_factor", 2),
        ("gradient_predivide_factor", np.float32(2)),
        ("gradient_predivide_factor", torch.tensor(2.0)),
        ("bucket_bytes", np.int64(100)),
        ("backward_passes_per_step", np.int32(1)),
        ("num_groups", 0),
        ("groups", []),
        ("groups", ()),
        ("groups", None),
    ]
    for argument, value in right:
        model = Branches()
        optimizer = hvd.DistributedOptimizer(make_sgd(model), **{argument: value})
        model(torch.ones(2, 4).double(), "a").sum().backward()
        optimizer.step()
    for wrong in (1.5, "2", True, None):
        with pytest.raises(TypeError, match="passes"):
            optimizer.set_backward_passes_per_step(wrong)


@pytest.mark.np(1, 2)
@pytest.mark.parametrize("argument", ["prescale_factor", "postscale_factor"])
@pytest.mark.parametrize("framework", ["torch", "numpy"])
def test_scale_factors(hvd, world, argument, framework):
    import hvdlite

    api = hvd if framework == "torch" else hvdlite
    ones = torch.ones(2) if framework == "torch" else np.ones(2, np.float32)
    functions = [
        lambda **k: api.allreduce(ones, **k),
        lambda **k: api.allreduce_(ones, **k),
        lambda **k: api.grouped_allreduce([ones], **k),
        lambda **k: api.allreduce_async(ones, **k),
        lambda **k: api.reducescatter(ones, **k),
        lambda **k: api.grouped_reducescatter([ones], **k),
    ]
    if framework == "torch":
        leaf = torch.ones(2, requires_grad=True)
        functions += [
            lambda **k: api.allreduce(leaf, **k),
            lambda **k: api.reducescatter(leaf, **k),
        ]
    wrong = [("2", TypeError), (None, TypeError), (np.ones(2), TypeError), (NAN, ValueError)]
    wrong += [(torch.ones(3), TypeError), (True, TypeError), (INF, ValueError), (2j, TypeError)]
    for function in functions:
        for value, error in wrong:
            with pytest.raises(error, match=f"rank {world.rank}.*{argument}"):
                function(**{argument: value})
    for value in (2, np.float64(2), torch.tensor(2.0), np.array(2)):
        result = api.allreduce(ones, op=hvd.Sum, **{argument: value})
        assert_close(torch.as_tensor(result), torch.full((2,), 2.0 * world.size))


@pytest.mark.np(1, 2)
def test_a_bool_is_no_operation(hvd, world):
    import hvdlite

    for api, ones in ((hvd, torch.ones(2)), (hvdlite, np.ones(2, np.float32))):
        for function in (api.allreduce, api.allreduce_, api.allreduce_async, api.reducescatter):
            for value in (True, False):
                with pytest.raises(TypeError, match=f"op must be .*average={value}"):
                    function(ones, op=value)
    sparse = torch.eye(2).to_sparse()
    with pytest.raises((TypeError, ValueError), match="op must be"):
        hvd.sparse_allreduce_async(sparse, name="s", op=True)


@pytest.mark.np(2)
def test_size_of_buckets_as_a_setting(hvd, world, monkeypatch):
    def buckets(**options):
        model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(6)))
        optimizer = hvd.DistributedOptimizer(make_sgd(model), model.named_parameters(), **options)
        counts = []
        for _ in range(2):
            before = hvd.statistics().responses
            optimizer.zero_grad()
            model(torch.ones(1, 8)).sum().backward()
            optimizer.step()
            counts.append(hvd.statistics().responses - before)
        return counts[-1]

    assert buckets() == 1
    hvd.shutdown()
    monkeypatch.setenv("HVDLITE_BUCKET_BYTES", "512")
    hvd.init()
    try:
        assert buckets() == 3  # two matrices of 256 bytes each
        assert buckets(bucket_bytes=1) == 6
        assert buckets(bucket_bytes=1 << 20) == 1
    finally:
        hvd.shutdown()
        monkeypatch.undo()
        hvd.init()
