"""Job scripts for Slurm: a preempted job is requeued, and a job ends with the exit code of its ranks."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.launch.hosts import slurm_job

ROOT = Path(__file__).parents[2]
JOBS = ["train.sbatch", "torchrun.sbatch"]
SIGNALLED = """
echo $$ >"$RANKS"
trap 'echo saved; exit %d' TERM
kill -USR1 $PPID
for i in $(seq 200); do sleep 0.05; done
"""
"""srun whose ranks end on SIGTERM; it sends the job script the signal that Slurm sends before the time limit."""


def _run_job(script: str, folder: Path, srun: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a job script with this srun."""
    (folder / "srun").write_text(f"#!/bin/sh\n{srun}\n")
    (folder / "srun").chmod(0o755)
    job = slurm_job(folder)
    return subprocess.run(
        [ROOT / "examples" / "slurm" / script, "mine.toml", "parallel.tp=8"],
        env=os.environ | job | {"PATH": f"{folder}:{job['PATH']}"} | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("script", JOBS)
@pytest.mark.parametrize(("status", "requeued"), [(75, ["4711"]), (0, [])], ids=["saved", "all steps done"])
def test_job_near_its_end_saves_and_is_queued_again(script, status, requeued, tmp_path):
    done = _run_job(script, tmp_path, SIGNALLED % status)
    assert (done.returncode, done.stdout, done.stderr) == (status, "saved\n", "")
    queue = tmp_path / "requeued"
    assert (queue.read_text().split() if queue.exists() else []) == requeued


@pytest.mark.parametrize("script", JOBS)
def test_signal_that_comes_before_the_job_waits_is_kept(script, tmp_path):
    slow = tmp_path / "slow"
    slow.write_text("trap 'sleep 0.1' DEBUG\n")
    done = _run_job(script, tmp_path, SIGNALLED % 75, BASH_ENV=str(slow))
    assert (done.returncode, done.stdout, done.stderr) == (75, "saved\n", "")
    assert (tmp_path / "requeued").read_text().split() == ["4711"]


@pytest.mark.parametrize("script", JOBS)
@pytest.mark.parametrize(("status", "requeued"), [(75, "4711\n"), (0, "")], ids=["saved", "all steps done"])
def test_preempted_job_whose_ranks_left_is_queued_again(script, status, requeued, tmp_path):
    (tmp_path / "requeued").touch()
    done = _run_job(script, tmp_path, f"exit {status}", PREEMPTED="2026-11-22T00:28:43")
    assert (done.returncode, done.stderr) == (status, "")
    assert (tmp_path / "requeued").read_text() == requeued


def test_torchrun_gives_the_ranks_the_time_that_slurm_gives(tmp_path):
    (seconds,) = re.findall(r"--signal=B:USR1@(\d+)", (ROOT / "examples" / "slurm" / "torchrun.sbatch").read_text())
    done = _run_job("torchrun.sbatch", tmp_path, 'echo "$TORCH_ELASTIC_SHUTDOWN_TIMEOUT"')
    assert done.stdout == f"{seconds}\n"


@pytest.mark.parametrize("script", JOBS)
def test_job_that_cannot_be_queued_again_says_so(script, tmp_path):
    scontrol = tmp_path / "scontrol"
    scontrol.write_text('#!/bin/sh\n[ "$1" = show ] && echo node1\n')
    scontrol.chmod(0o755)
    done = _run_job(script, tmp_path, SIGNALLED % 75)
    assert (done.returncode, done.stdout) == (75, "saved\n")
    assert "job 4711 is not queued again; submit it again" in done.stderr


@pytest.mark.parametrize("script", JOBS)
@pytest.mark.parametrize("status", [0, 3])
def test_job_ends_as_its_ranks_did(script, status, tmp_path):
    done = _run_job(script, tmp_path, f'echo "$*"; exit {status}')
    assert (done.returncode, done.stderr) == (status, "")
    assert done.stdout.endswith("megalin train mine.toml parallel.tp=8\n")
    assert not (tmp_path / "requeued").exists()


@pytest.mark.parametrize(("cpus", "gpus", "threads"), [("96", "8", "12"), ("1", "8", "1"), ("", "2", "1")])
def test_threads_share_the_cores_of_a_node(cpus, gpus, threads, tmp_path):
    environment = {"SLURM_CPUS_PER_TASK": cpus, "SLURM_GPUS_ON_NODE": gpus}
    done = _run_job("torchrun.sbatch", tmp_path, 'echo "$OMP_NUM_THREADS $*"', **environment)
    assert done.stdout.startswith(f"{threads} ")
    assert f"--nproc-per-node {gpus} " in done.stdout
