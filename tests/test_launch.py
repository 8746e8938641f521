"""Launchers: the variables of each become the five that torch.distributed reads."""

import os
import shutil
import subprocess
import sys

import pytest

from megalin import launch
from megalin.api.trainer import Trainer
from megalin.errors import ConfigError
from megalin.launch import Launch, adopt_launcher, check_all_ranks_start, is_on_one_host, launched
from megalin.train.config import load_run_config
from tests.model_runs import write_config

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
SRUN = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1"}
ADDRESS = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


def test_without_a_launcher_there_is_one_rank():
    one_task = {"SLURM_NTASKS": "1", "SLURM_JOB_NUM_NODES": "1", "SLURM_NTASKS_PER_NODE": "1"}
    for environment in ({}, {"SLURM_PROCID": "0", "SLURM_JOB_ID": "1"} | one_task):  # a batch script is no rank
        before = dict(environment)
        check_all_ranks_start(environment)
        assert adopt_launcher(environment) == Launch(0, 1, 0)
        assert environment == before


JOBS = [
    ({"SLURM_NTASKS": "4"}, "SLURM_STEP_NUM_TASKS, which srun"),
    ({"SLURM_NPROCS": "4"}, "SLURM_STEP_NUM_TASKS, which srun"),
    ({"SLURM_JOB_NUM_NODES": "2"}, "SLURM_STEP_NUM_TASKS, which srun"),
    ({"SLURM_JOB_NUM_NODES": "1", "SLURM_NTASKS_PER_NODE": "8"}, "SLURM_STEP_NUM_TASKS, which srun"),
    ({"PMI_SIZE": "4"}, "MPI_LOCALRANKID, which MPICH's mpirun"),
    ({"OMPI_COMM_WORLD_SIZE": "4"}, "OMPI_COMM_WORLD_RANK, which Open MPI's mpirun"),
]


@pytest.mark.parametrize(("job", "marker"), JOBS)
def test_a_job_of_several_ranks_needs_its_launcher(job, marker):
    with pytest.raises(
        ConfigError, match=rf"= \d, but {marker} sets in every rank, is not set: this process would run"
    ):
        check_all_ranks_start(job | {"SLURM_PROCID": "0", "PMI_RANK": "0"})


@pytest.mark.parametrize("variables", [{"SLURM_PROCID": "3", "SLURM_LOCALID": "3"}, {"PMI_RANK": "1"}])
def test_a_rank_without_its_launchers_other_variables_is_refused(variables):
    with pytest.raises(ConfigError, match=r"\w+ = \d, but \w+, which .* sets in every rank, is not set"):
        launched(variables)


@pytest.mark.parametrize("variables", [TORCHRUN, SRUN | ADDRESS, OPEN_MPI | ADDRESS, MPICH | ADDRESS])
def test_ranks_of_a_launcher_start_whatever_the_job(variables):
    for job, _ in JOBS[:4]:
        check_all_ranks_start(job | {"SLURM_PROCID": "0"} | variables)
        assert adopt_launcher(job | variables) == Launch(3, 4, 1)


def test_trainer_refuses_to_be_the_only_rank_of_a_job(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_NTASKS", "2")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ConfigError, match="SLURM_NTASKS = 2, but SLURM_STEP_NUM_TASKS, which srun sets in every rank"):
        Trainer(load_run_config(write_config(tmp_path), []), tmp_path / "run").train()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("variables", [TORCHRUN, SRUN | ADDRESS, OPEN_MPI | ADDRESS, MPICH | ADDRESS])
def test_each_launcher_becomes_the_same_five_variables(variables):
    environment = dict(variables)
    assert adopt_launcher(environment) == Launch(3, 4, 1)
    assert {name: environment[name] for name in TORCHRUN} == TORCHRUN


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, True),
        (TORCHRUN, None),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "4"}, True),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "2"}, False),
        (TORCHRUN | {"LOCAL_SIZE": "4"}, True),
        (OPEN_MPI | ADDRESS | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, False),
        (MPICH | ADDRESS | {"MPI_LOCALNRANKS": "4"}, True),
        (SRUN | ADDRESS, None),
        (SRUN | ADDRESS | {"SLURM_STEP_NUM_NODES": "2"}, None),
        (SRUN | ADDRESS | {"SLURM_STEP_NUM_NODES": "1"}, True),
    ],
)
def test_one_host_is_known_where_the_launcher_names_the_ranks_of_a_host(variables, expected):
    environment = dict(variables)
    assert is_on_one_host(environment) is expected
    adopt_launcher(environment)  # from now on the variables of torchrun count
    assert is_on_one_host(environment) is expected


def test_torchrun_inside_a_step_of_srun_is_the_launcher():
    assert launched(SRUN | {"SLURM_PROCID": "0"} | TORCHRUN) == Launch(3, 4, 1)


def test_a_daemon_that_srun_started_is_no_launcher():
    daemon = SRUN | {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}
    assert launched(daemon | OPEN_MPI) == launched(daemon | MPICH) == Launch(3, 4, 1)


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("gpu[07-09,12],login", "gpu07"),
        ("gpu[7,9]", "gpu7"),
        ("login,gpu[1-2]", "login"),
        ("a.example.org", "a.example.org"),
        ("rack[3-4]-ib0", "rack3-ib0"),
        ("rack[0-1]n[2-3],gpu7", "rack0n2"),
    ],
)
def test_srun_meets_at_the_first_host_of_the_step(hosts, first):
    environment = SRUN | {"SLURM_STEP_NODELIST": hosts}
    adopt_launcher(environment)
    assert environment["MASTER_ADDR"] == first
    assert 20000 <= int(environment["MASTER_PORT"]) < 30000


def test_steps_of_a_job_meet_at_different_ports_and_ranks_of_a_step_at_one():
    def port(**changes):
        environment = SRUN | changes
        adopt_launcher(environment)
        return environment["MASTER_PORT"]

    assert port() == port(SLURM_PROCID="0", SLURM_LOCALID="0")
    assert len({port(), port(SLURM_STEP_ID="3"), port(SLURM_JOB_ID="4712")}) == 3


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "0", "WORLD_SIZE": "two", "LOCAL_RANK": "0"}, "variable WORLD_SIZE = 'two' is not a number; start"),
        (TORCHRUN | {"RANK": "-1"}, "variable RANK = '-1' is not a number"),
        (TORCHRUN | {"RANK": ""}, "variable RANK = '' is not a number"),
        ({"LOCAL_RANK": "x"}, "variable LOCAL_RANK = 'x' is not a number"),
        (TORCHRUN | {"RANK": "4"}, "RANK = 4 is not below WORLD_SIZE = 4; start the ranks with megalin launch"),
        (TORCHRUN | {"LOCAL_RANK": "4"}, "LOCAL_RANK = 4 is above RANK = 3"),
        ({"RANK": "0", "LOCAL_RANK": "0"}, "torchrun started this process, but WORLD_SIZE is not set"),
        ({"WORLD_SIZE": "8"}, "WORLD_SIZE = 8, but RANK is not set; start the ranks"),
        (SRUN | {"WORLD_SIZE": "8"}, r"WORLD_SIZE = '8', but srun started 4 ranks \(SLURM_STEP_NUM_TASKS\); unset"),
        ({"SLURM_STEP_NUM_TASKS": "4"}, "srun started this process, but SLURM_PROCID is not set"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_RANK = 3 is not below OMPI_COMM_WORLD_SIZE = 2"),
        (SRUN | {"SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NODELIST = '' names no host; set MASTER_ADDR"),
        (SRUN | {"MASTER_PORT": "0"}, "variable MASTER_PORT = 0 is not a port; use 1 to 65535"),
        (
            OPEN_MPI | {"MASTER_ADDR": "a"},
            "mpirun started this process, but MASTER_PORT is not set; set it to the number",
        ),
        (
            {name: TORCHRUN[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")},
            "torchrun started this process, but MASTER_ADDR is not set; set it to the host of rank 0",
        ),
    ],
)
def test_a_broken_launch_is_refused(environment, message):
    with pytest.raises(ConfigError, match=message):
        adopt_launcher(environment)


def test_failed_broadcast_of_mpirun_is_reported_with_its_reason(monkeypatch):
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(
        ConfigError, match=r"rank 0 could not broadcast them through mpi4py \(no output\); install mpi4py for this MPI"
    ):
        adopt_launcher(dict(MPICH))
    with pytest.raises(ConfigError, match="for a wheel of mpi4py, set MPI4PY_MPIABI=openmpi"):
        adopt_launcher(dict(OPEN_MPI))


@pytest.mark.skipif(shutil.which("mpirun", path=os.path.dirname(sys.executable)) is None, reason="needs mpich, mpi4py")
def test_ranks_of_mpirun_agree_on_an_address(tmp_path):
    mpirun = shutil.which("mpirun", path=os.path.dirname(sys.executable))
    # One file a rank: prints of several ranks may mix within a line.
    show = (
        "import os, sys; from pathlib import Path; from megalin.launch import *; launch = adopt_launcher();"
        "shown = *launch, os.environ['MASTER_ADDR'], os.environ['MASTER_PORT'];"
        "Path(sys.argv[1], str(launch.rank)).write_text(' '.join(map(str, shown)))"
    )
    subprocess.run([mpirun, "-n", "3", sys.executable, "-c", show, tmp_path], capture_output=True, check=True)
    rows = [path.read_text().split() for path in sorted(tmp_path.iterdir())]
    assert [row[:3] for row in rows] == [["0", "3", "0"], ["1", "3", "1"], ["2", "3", "2"]]
    assert len({tuple(row[3:]) for row in rows}) == 1


def test_a_bad_launch_ends_the_command_before_torch_is_imported():
    code = (
        "import sys; from megalin.__main__ import main; "
        "status = main(['train', 'x.toml']); assert 'torch' not in sys.modules; sys.exit(status)"
    )
    environment = os.environ | {"RANK": "1", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "ConfigError: RANK = 1 is not below WORLD_SIZE = 1; " + launch._REMEDY + "\n"
