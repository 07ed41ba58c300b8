"""Arrays and where they lie."""

from __future__ import annotations

import numpy as np

from hvdlite.transport.places import Places


def test_arrays_that_share_memory_are_known():
    whole = np.zeros(10, np.int16)
    assert not Places.of([]).overlap()
    assert not Places.of([whole[6:], whole[:2], whole[2:6]]).overlap()
    assert Places.of([whole[6:], whole[:3], whole[2:6]]).overlap()
    assert Places.of([whole, whole[4:5]]).overlap()
