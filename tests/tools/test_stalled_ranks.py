"""Ranks that get SIGSTOP or SIGKILL in each phase of a run: the others name the rank and leave with the right code."""

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
