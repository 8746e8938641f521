"""Collectives of libraries in which a thread waits, read from its stack: they mark no heartbeat.

The engine of a pipeline, FSDP's all-reduce over replicas, DeepSpeed, the checkpoint library and compiled blocks call
torch.distributed themselves. Only a rank that makes no progress looks at its stack, so that steps pay nothing for it.
"""

from __future__ import annotations

import linecache
import re
import sys
from pathlib import PurePath
from types import FrameType

_COLLECTIVES = "torch/distributed/distributed_c10d.py"
"""The file of torch's collectives: a thread whose innermost frame is there waits for other ranks."""
_WAIT = re.compile(r"\b(work|w)\.wait\(|\bwait_tensor\b")
"""Source of other lines that wait for the result of a collective."""
_DISPATCH = re.compile(r"/torch/(_ops\.py|_library/)")
"""Files of frames between such a line and the call that waits."""


def blocked_call(thread: int) -> str:
    """The collective in which a thread of this process waits, and its caller in this package, as
    "all_reduce, called by step in train/step.py:120"; empty where it waits for none.

    Args:
        thread: its `threading.Thread.ident`.
    """
    frame = sys._current_frames().get(thread)
    while frame is not None and _DISPATCH.search(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None or not (name := _collective(frame)):
        return ""
    caller = frame.f_back
    while caller is not None and "/megalin/" not in caller.f_code.co_filename:
        caller = caller.f_back
    if caller is None:
        return name
    place = caller.f_code.co_filename.rpartition("/megalin/")[2]
    return f"{name}, called by {caller.f_code.co_name} in {place}:{caller.f_lineno}"


def _collective(frame: FrameType) -> str:
    """The collective of the innermost frame; empty where its line is none."""
    code = frame.f_code
    if code.co_filename.endswith(_COLLECTIVES):
        return code.co_name
    found = _WAIT.search(linecache.getline(code.co_filename, frame.f_lineno or 0))
    if found is None:
        return ""
    compiled = "/torch/" not in code.co_filename and found[0] == "wait_tensor"
    return "a collective of a compiled block" if compiled else f"{code.co_name} in {PurePath(code.co_filename).name}"
