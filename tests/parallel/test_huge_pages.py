"""Large arrays lie on huge pages where they may: what is asked for shows in their mappings."""

from __future__ import annotations

from inspect import getsource
from pathlib import Path

import pytest

from ..mappings import asks_for_huge_pages
from .jobs import run_job

pytestmark = [
    pytest.mark.whole_job,
    pytest.mark.np(1, 2),
    pytest.mark.skipif(
        not Path("/sys/kernel/mm/transparent_hugepage").is_dir(), reason="no huge pages here"
    ),
]

TENSORS = """
import hvdlite_torch as hvd
hvd.init()
import torch
from jobtools import say
tensor = torch.ones(2**21)
hvd.allreduce_(tensor, op=hvd.Sum)
assert (tensor == hvd.size()).all()
say(hvd.rank(), asked=asks_for_huge_pages(tensor.data_ptr() + tensor.nbytes // 2))
"""


@pytest.mark.parametrize(
    ("variables", "asks"),
    [({}, True), ({"HVDLITE_HUGE_PAGES": "0"}, False), ({"THP_MEM_ALLOC_ENABLE": "0"}, False)],
    ids=["by default", "switched off", "switched off for torch"],
)
def test_tensors_that_are_made_after_init(np_size, variables, asks):
    pytest.importorskip("torch")
    environment = {"THP_MEM_ALLOC_ENABLE": None, "GLIBC_TUNABLES": None, **variables}
    result = run_job(np_size, getsource(asks_for_huge_pages) + TENSORS, timeout=40, env=environment)
    assert result.returncode == 0, str(result)
    assert [result.said[rank] for rank in range(np_size)] == [[{"asked": asks}]] * np_size
