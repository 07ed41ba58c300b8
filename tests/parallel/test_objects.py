"""Any picklable object travels, of any size, from any rank."""

from __future__ import annotations

import numpy as np
import pytest


def _object(rank):
    return {
        "rank": rank,
        "text": "x" * (1000 * rank),
        "array": np.arange(rank),
        3: [None, (1, 2.5)],
    }


def test_broadcast_object_from_every_root(hvd, world):
    for root in world.ranks:
        result = hvd.broadcast_object(_object(world.rank), root_rank=root)
        right = _object(root)
        np.testing.assert_array_equal(result.pop("array"), right.pop("array"))
        assert result == right
    assert hvd.broadcast_object(None if world.rank else "root", name="named") == "root"


def test_broadcast_object_may_be_large(hvd, world):
    value = hvd.broadcast_object(bytes(range(256)) * 20_000 if world.rank == 0 else None)
    assert value == bytes(range(256)) * 20_000


def test_allgather_object(hvd, world):
    results = hvd.allgather_object(_object(world.rank))
    assert [result["rank"] for result in results] == list(world.ranks)
    assert [len(result["text"]) for result in results] == [1000 * rank for rank in world.ranks]
    assert hvd.allgather_object(None, name="nothing") == [None] * world.size


@pytest.mark.np(1)  # with more ranks the others would wait until the failing one ends the job
def test_unpicklable_object_is_refused(hvd):
    with pytest.raises(Exception, match="pickle"):
        hvd.broadcast_object(lambda: None)
    assert hvd.broadcast_object(1) == 1
