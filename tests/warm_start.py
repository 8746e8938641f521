"""Work that each rank of the tests would repeat, done once in the process that ranks are forked from: the hash of
megalin's code, the validators of a run's config, and torch's first tensor without memory. None of it depends on a rank.
"""

import tempfile
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megalin.config import dumps
from megalin.train.config import load_run_config
from megalin.train.identity import code_digest
from tests.model_runs import write_config

code_digest()
with tempfile.TemporaryDirectory() as folder:
    dumps(load_run_config(write_config(Path(folder)), []))
with FakeTensorMode():
    torch.empty_strided((1, 1), (1, 1)).detach()
