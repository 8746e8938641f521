"""Runs across two hosts: each launcher resumes from a checkpoint, and a dead rank or host costs no step."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from megalin.train.config import load_run_config
from tests.launch.hosts import BIN, RSH, Hosts, slurm_job, two_hosts
from tests.model_runs import ledger, losses, metrics, train_here, write_config
from tests.ranks import run_ranks

ROOT = Path(__file__).parents[2]
STEPS = 12
MANY_STEPS = 40
"""Steps of the runs with the slow tests, which end a process between two steps of the second half."""
SECONDS = 200.0
"""Longest wait for a step or the end of a run; on idle cores a run takes a twentieth of it."""


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    try:
        with two_hosts() as hosts:
            yield hosts
    except OSError as error:
        pytest.skip(f"no network namespaces here: {error}")


@pytest.fixture(scope="module")
def config(with_slow: bool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    steps = MANY_STEPS if with_slow else STEPS
    saves = {"every_steps": steps // 4, "keep_latest": 2}
    return write_config(tmp_path_factory.mktemp("two_hosts"), train={"steps": steps}, checkpoint=saves)


def _train_both(config: Path, folder: Path) -> None:
    steps = load_run_config(config, []).train.steps
    train_here(config, folder / "whole")
    train_here(config, folder / "half", f"train.stop_after_steps={steps // 2}")


@pytest.fixture(scope="module")
def runs(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an uninterrupted run on two ranks of one host, "whole", and one that stopped midway, "half"."""
    folder = tmp_path_factory.mktemp("runs")
    run_ranks(2, _train_both, config, folder)
    return folder


@pytest.fixture
def run(runs: Path, tmp_path: Path) -> Path:
    """A copy of the run that stopped midway."""
    return Path(shutil.copytree(runs / "half", tmp_path / "run"))


def assert_same_run(run: Path, runs: Path) -> None:
    """Asserts that each step ran once, with the losses, norms and tokens of the uninterrupted run, to the last bit."""
    expected = metrics(runs / "whole")
    # A run evaluates after its last step, also if it only stops there.
    assert [line | {"evaluation_loss": 0} for line in metrics(run)] == [
        line | {"evaluation_loss": 0} for line in expected
    ]
    assert metrics(run)[-1] == expected[-1]
    assert ledger(run) == ledger(runs / "whole")


def assert_resumes(processes: list[subprocess.Popen[bytes]], log: Path, runs: Path) -> None:
    """Asserts that the run succeeds without repeating its first half."""
    assert_succeeds(processes, log)
    half, steps = len(losses(runs / "half")), len(losses(runs / "whole"))
    assert f"step {half + 1}/{steps} " in log.read_text()
    assert f"step 1/{steps} " not in log.read_text()


def assert_succeeds(processes: list[subprocess.Popen[bytes]], log: Path) -> None:
    for process in processes:
        assert process.wait(SECONDS) == 0, log.read_text()


def wait_for_step(step: int, run: Path, process: subprocess.Popen[bytes], log: Path) -> None:
    """Waits until the run has done this many steps."""
    deadline = time.monotonic() + SECONDS
    while not (run / "metrics.jsonl").exists() or len(losses(run)) < step:
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.02)


def training_rank(rank: int, process: subprocess.Popen[bytes]) -> int:
    """Process id of a rank among the descendants of `process`."""
    found = [process.pid]
    for pid in found:
        found += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    for pid in found:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if b"RANK=%d" % rank in variables:
            return pid
    raise AssertionError(f"no rank {rank} among processes {found}")


def test_srun_resumes_across_hosts(hosts, config, run, runs, tmp_path):
    command = [ROOT / "examples/slurm/train.sbatch", config, "--folder", run]
    job = hosts.start("node1", command, tmp_path / "log", slurm_job(tmp_path, nodes=2))
    assert_resumes([job], tmp_path / "log", runs)
    assert_same_run(run, runs)


@pytest.mark.slow
def test_deepspeed_resumes_across_hosts_with_its_engine(hosts, config, run, runs, tmp_path):
    example = ROOT / "examples" / "deepspeed"
    (tmp_path / "hostfile").write_text("node1 slots=1\nnode2 slots=1\n")
    engine = ["train.engine=deepspeed", f"train.deepspeed_config={example / 'ds.json'}"]
    environment = {"PATH": f"{BIN}:{os.environ['PATH']}", "HOSTFILE": str(tmp_path / "hostfile")}
    ranks = [
        hosts.start(
            host,
            [example / "run.sh", config, "--folder", run, *engine],
            tmp_path / "log",
            environment | {"NODE_RANK": str(number)},
        )
        for number, host in enumerate(hosts.names)
    ]
    assert_resumes(ranks, tmp_path / "log", runs)
    assert losses(run) == pytest.approx(losses(runs / "whole"), rel=2e-5)
    assert ledger(run) == ledger(runs / "whole")


@pytest.mark.slow
@pytest.mark.skipif(not (BIN / "mpirun").exists(), reason="needs mpich, mpi4py")
def test_mpirun_resumes_across_hosts(hosts, config, run, runs, tmp_path):
    launch = [BIN / "mpirun", "-launcher", "rsh", "-launcher-exec", RSH, "-hosts", ",".join(hosts.names), "-ppn", "1"]
    command = [*launch, "-n", "2", sys.executable, "-m", "megalin", "train", config, "--folder", run]
    # One kernel runs both hosts, so MPI would use shared memory, which they do not have.
    job = hosts.start("node1", command, tmp_path / "log", {"UCX_TLS": "tcp"})
    assert_resumes([job], tmp_path / "log", runs)
    assert_same_run(run, runs)


@pytest.mark.slow
def test_torchrun_starts_a_dead_rank_again(hosts, config, run, runs, tmp_path):
    environment = slurm_job(tmp_path) | {"RANKS_PER_NODE": "2"}
    command = [ROOT / "examples/slurm/torchrun.sbatch", config, "--folder", run]
    job = hosts.start("node1", command, tmp_path / "log", environment)
    wait_for_step(MANY_STEPS // 2 + 5, run, job, tmp_path / "log")
    os.kill(training_rank(1, job), signal.SIGKILL)
    assert_resumes([job], tmp_path / "log", runs)
    assert_same_run(run, runs)
    assert (tmp_path / "log").read_text().count(f"step {MANY_STEPS}/{MANY_STEPS}") == 1


@pytest.mark.slow
def test_torchrun_accepts_a_restarted_host_of_the_compose_file(hosts, config, runs, tmp_path):
    node = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())["services"]["node2"]
    here = {"torchrun": BIN / "torchrun", "/opt/megalin/examples/quickstart/transnormer.toml": config}
    here |= {"--folder=runs/two-hosts": f"--folder={tmp_path / 'run'}"}
    command = [here.pop(word, word) for word in node["command"]]
    assert not here, f"compose.yaml does not name {list(here)}"

    def start(host: str) -> subprocess.Popen[bytes]:
        return hosts.start(host, command, tmp_path / "log", node["environment"])

    first, second = map(start, hosts.names)
    wait_for_step(5, tmp_path / "run", first, tmp_path / "log")
    second.kill()
    second.wait()
    assert_succeeds([first, start("node2")], tmp_path / "log")
    assert_same_run(tmp_path / "run", runs)
