"""Ranks that get SIGSTOP or SIGKILL in each phase of a run: the others name the rank and leave with the right code."""

import re
import signal

import pytest
from fault_matrix import hang_rows
from fault_matrix.lab import Lab


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
@pytest.mark.parametrize("phase", ["start", "step", "save", "evaluation"])
@pytest.mark.parametrize(("ranks", "victim"), [(2, 0), (2, 1), (4, 0), (4, 2), (4, 3)])
def test_rank_is_named_and_no_process_is_left(tmp_path, ranks, victim, phase, number):
    lab = Lab(tmp_path / "lab", tmp_path)
    hang_rows.signalled_rank(lab, ranks=ranks, victim=victim, phase=phase, number=number)
    assert [check for check in lab.checks if not check.holds] == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
@pytest.mark.parametrize("victim", [0, 3])
def test_rank_of_another_host_is_named(tmp_path, victim, number):
    lab = Lab(tmp_path / "lab", tmp_path)
    outcomes = hang_rows.signalled_rank(lab, ranks=4, victim=victim, number=number, hosts=2)
    details = ("rank named by all", "phase and step named")  # its own host names these
    assert [check for check in lab.checks if not check.holds and check.name not in details] == []
    named = (
        rf"rank {victim} (stalled|died|of another host).*|rank 0, which hosts the store|no response from rank {victim}"
    )
    assert all(re.search(named, outcome.text) for outcome in outcomes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "call", "place", "after"),
    [
        (["parallel.pp=2"], "_wait_batch_p2p in schedules.py, called by", "", False),
        (["parallel.shard=1"], "all_reduce, called by", "torch.distributed:all_reduce", False),
        (
            ["parallel.tp=2", "train.compile=true"],
            "a collective of a compiled block, called by _run in model/block.py",
            "megalin.parallel.embedding:VocabParallelEmbedding.embed",
            True,
        ),
        (
            ["train.engine=deepspeed", "parallel.zero=1"],
            r"\w+, called by step in train/deepspeed_engine.py",
            "deepspeed.runtime.engine:DeepSpeedEngine.backward",
            False,
        ),
    ],
    ids=["transfer of a pipeline", "all-reduce over replicas", "compiled block", "deepspeed"],
)
def test_collective_in_which_the_others_wait_is_named(tmp_path, overrides, call, place, after):
    lab = Lab(tmp_path / "lab", tmp_path)
    hang_rows.sleeping_rank(lab, *overrides, call=call, place=place, after=after)
    assert [check for check in lab.checks if not check.holds] == []


MESHES = [
    pytest.param(4, ["parallel.shard=2"], "all_reduce", id="four replicas and shards"),
    pytest.param(4, ["parallel.pp=2"], "all_reduce", id="two pipelines"),
    pytest.param(2, ["parallel.pp=2"], "_wait_batch_p2p", id="one pipeline"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "overrides", "waits"), MESHES)
def test_last_ops_of_another_order_are_named(tmp_path, ranks, overrides, waits):
    lab = Lab(tmp_path / "lab", tmp_path)
    hang_rows.other_order(lab, *overrides, ranks=ranks, waits=waits)
    assert [check for check in lab.checks if not check.holds] == []


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "overrides", "waits"), MESHES)
def test_stuck_reader_is_named(tmp_path, ranks, overrides, waits):
    lab = Lab(tmp_path / "lab", tmp_path)
    hang_rows.stuck_reader(lab, *overrides, ranks=ranks)
    assert [check for check in lab.checks if not check.holds] == []
