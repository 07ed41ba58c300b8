"""Large arrays lie on huge pages where they may: what is asked for shows in their mappings."""

from __future__ import annotations

from pathlib import Path

import pytest

from .jobs import run_job

pytestmark = [
    pytest.mark.whole_job,
    pytest.mark.np(1, 2),
    pytest.mark.skipif(
        not Path("/sys/kernel/mm/transparent_hugepage").is_dir(), reason="no huge pages here"
    ),
]

ASKED = """
    import pathlib
    from jobtools import say

    def asked(address):
        \"\"\"Return whether the mapping at an address has asked for huge pages.\"\"\"
        inside = False
        for line in pathlib.Path("/proc/self/smaps").read_text().splitlines():
            span, _, rest = line.partition(" ")
            if "-" in span and ":" not in span:
                first, last = (int(end, 16) for end in span.split("-"))
                inside = first <= address < last
            elif inside and span == "VmFlags:":
                return "hg" in rest.split()
        raise AssertionError("no such mapping")
"""

TENSORS = """
    import hvdlite_torch as hvd
    hvd.init()
    import torch
    tensor = torch.ones(2**21)
    hvd.allreduce_(tensor, op=hvd.Sum)
    assert (tensor == hvd.size()).all()
    say(hvd.rank(), asked=asked(tensor.data_ptr() + tensor.nbytes // 2))
"""


@pytest.mark.parametrize(
    ("variables", "asks"),
    [({}, True), ({"HVDLITE_HUGE_PAGES": "0"}, False), ({"THP_MEM_ALLOC_ENABLE": "0"}, False)],
    ids=["by default", "switched off", "switched off for torch"],
)
def test_tensors_that_are_made_after_init(np_size, variables, asks):
    pytest.importorskip("torch")
    environment = {"THP_MEM_ALLOC_ENABLE": None, "GLIBC_TUNABLES": None, **variables}
    result = run_job(np_size, ASKED + TENSORS, timeout=40, env=environment)
    assert result.returncode == 0, str(result)
    assert [result.said[rank] for rank in range(np_size)] == [[{"asked": asks}]] * np_size
