"""What each rank of `hvdlite.run` runs: fetch the function, call it, send back what it returns."""

from __future__ import annotations

import json
import os
import pickle
import sys
from typing import Any

from .rank import ADDRESS, HELLO, TASK, TOKEN, FrameReader, connect, frame, identity

__all__ = ["main"]


def main() -> None:
    """Run this rank's call.

    Raises:
        RuntimeError: there is no launcher to fetch it from.
        Exception: whatever the function raises, and whatever pickle does.
    """
    connection = connect(os.environ[ADDRESS])
    rank, _, _ = identity()
    hello = {"token": os.environ[TOKEN], "rank": rank, "task": True}
    connection.sendall(frame(HELLO, json.dumps(hello).encode()))
    frames = FrameReader()
    payload: bytes | None = None
    while payload is None:
        data = connection.recv(1 << 20)
        if not data:
            raise RuntimeError("The launcher has gone before it sent the function to run.")
        payload = next((body for kind, body in frames.feed(data) if kind == TASK), None)
    paths, call = pickle.loads(payload)
    # Modules that the function refers to by name are found where the caller finds them.
    sys.path[:] = [*paths, *(path for path in sys.path if path not in paths)]
    function, args, kwargs = pickle.loads(call)
    result = function(*args, **kwargs)
    connection.sendall(frame(TASK, _dump(result, rank)))
    connection.close()


def _dump(result: Any, rank: int) -> bytes:
    try:
        import cloudpickle as pickler
    except ImportError:
        pickler = pickle
    try:
        return bytes(pickler.dumps(result))
    except Exception as error:
        raise TypeError(
            f"Rank {rank} returned a {type(result).__name__}, which cannot be sent back: {error}"
        ) from error


if __name__ == "__main__":
    main()
