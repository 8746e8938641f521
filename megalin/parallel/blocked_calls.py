"""Collectives of libraries in which a thread waits, read from its stack: they mark no heartbeat.

The engine of a pipeline, FSDP's all-reduce over replicas, DeepSpeed, the checkpoint library and compiled blocks call
torch.distributed themselves. Only a rank that makes no progress looks at its stack, so that steps pay nothing for it.
"""

from __future__ import annotations

import linecache
import os
import re
import sys
from pathlib import PurePath
from types import FrameType

import torch
from torch.distributed import distributed_c10d

_COLLECTIVES = distributed_c10d.__file__
"""The file of torch's collectives: a thread whose innermost frame is there waits for other ranks."""
_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
_TORCH = os.path.join(os.path.dirname(torch.__file__), "")
_WAIT = re.compile(r"\b(work|w)\.wait\(|\bwait_tensor\b")
"""Source of other lines that wait for the result of a collective."""
_DISPATCH = tuple(os.path.join(_TORCH, name) for name in ("_ops.py", os.path.join("_library", "")))
"""File and folder of frames between such a line and the call that waits."""


def blocked_call(thread: int) -> str:
    """The collective in which a thread of this process waits, and its caller in this package, as
    "all_reduce, called by step in train/step.py:120"; empty where it waits for none.

    Args:
        thread: its `threading.Thread.ident`.
    """
    frame = sys._current_frames().get(thread)
    while frame is not None and frame.f_code.co_filename.startswith(_DISPATCH):
        frame = frame.f_back
    if frame is None or not (name := _collective(frame)):
        return ""
    caller = frame.f_back
    while caller is not None and not caller.f_code.co_filename.startswith(_PACKAGE):
        caller = caller.f_back
    if caller is None:
        return name
    place = caller.f_code.co_filename.removeprefix(_PACKAGE)
    return f"{name}, called by {caller.f_code.co_name} in {place}:{caller.f_lineno}"


def _collective(frame: FrameType) -> str:
    """The collective of the innermost frame; empty where its line is none."""
    code = frame.f_code
    if code.co_filename == _COLLECTIVES:
        return code.co_name
    found = _WAIT.search(linecache.getline(code.co_filename, frame.f_lineno or 0))
    if found is None:
        return ""
    compiled = not code.co_filename.startswith(_TORCH) and found[0] == "wait_tensor"
    return "a collective of a compiled block" if compiled else f"{code.co_name} in {PurePath(code.co_filename).name}"
