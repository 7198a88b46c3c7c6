"""Launching: what each launcher's environment means, and joining a world once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallax.errors import LaunchError
from parallax.launch import launch, launch_from_torch
from parallax.surroundings import Surroundings, first_host, surroundings

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "6",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_ID": "2",
    "SLURM_JOB_ID": "1000",
    "SLURM_STEP_TASKS_PER_NODE": "4,2",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_JOB_NODELIST": "gpu[05-08]",
    "SLURM_LAUNCH_NODE_IPADDR": "10.9.9.9",
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "prterun-host-4711@1",
}
REMEDY = "Start the processes with torchrun, or unset RANK and WORLD_SIZE to run as a world of one."


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


def test_nothing_is_a_world_of_one() -> None:
    assert surroundings({}) == Surroundings("none", 0, 1, 0, 1, None, None)


def test_torchrun() -> None:
    assert surroundings(TORCHRUN) == Surroundings("torchrun", 5, 8, 1, 4, "10.0.0.1", 29500)


def test_one_process_per_host_without_local_ranks() -> None:
    found = surroundings(without(TORCHRUN, "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    assert (found.local_rank, found.local_world) == (0, 1)


def test_all_processes_on_one_host_without_local_ranks() -> None:
    environ = without(TORCHRUN, "LOCAL_RANK", "LOCAL_WORLD_SIZE") | {"MASTER_ADDR": "localhost"}
    found = surroundings(environ)
    assert (found.local_rank, found.local_world) == (5, 8)


def test_slurm_meets_on_the_first_host_of_the_step() -> None:
    assert surroundings(SRUN) == Surroundings("slurm", 5, 6, 1, 2, "gpu07", 10_000 + 11_002)


def test_slurm_falls_back_on_the_launch_node() -> None:
    found = surroundings(without(SRUN, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"))
    assert found.address == "10.9.9.9"


def test_slurm_steps_side_by_side_meet_on_different_ports() -> None:
    assert surroundings(SRUN).port != surroundings(SRUN | {"SLURM_STEP_ID": "3"}).port


def test_slurm_obeys_a_master_that_is_set() -> None:
    found = surroundings(SRUN | {"MASTER_ADDR": "head", "MASTER_PORT": "1234"})
    assert (found.address, found.port) == ("head", 1234)


def test_slurm_with_one_gpu_shown_per_task() -> None:
    assert surroundings(SRUN | {"SLURM_GPUS_PER_TASK": "1"}).own_gpu


def test_slurm_of_two_tasks_without_a_step() -> None:
    environ = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "a1"}
    assert surroundings(environ).world == 2


@pytest.mark.parametrize(
    "environ",
    [
        pytest.param({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4"}, id="salloc"),
        pytest.param(
            {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, id="sbatch script"
        ),
        pytest.param(
            {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967290"},
            id="interactive step",
        ),
        pytest.param(
            {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_STEPID": "4294967291"},
            id="batch step",
        ),
    ],
)
def test_a_shell_inside_an_allocation_is_a_world_of_one(environ: dict[str, str]) -> None:
    assert surroundings(environ) == Surroundings()


def test_srun_of_one_task() -> None:
    environ = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_ID": "0"}
    assert (surroundings(environ).launcher, surroundings(environ).world) == ("slurm", 1)


def test_mpi_on_one_host_needs_no_address() -> None:
    found = surroundings(MPIRUN)
    assert (found.launcher, found.rank, found.local_world) == ("mpi", 3, 4)
    assert found.address == "127.0.0.1"
    assert found.port == surroundings(MPIRUN | {"OMPI_COMM_WORLD_RANK": "0"}).port


def test_mpi_on_two_hosts_needs_an_address() -> None:
    environ = MPIRUN | {"OMPI_COMM_WORLD_SIZE": "8"}
    with pytest.raises(LaunchError) as caught:
        surroundings(environ)
    assert str(caught.value) == (
        "mpirun started 8 ranks, 4 of them on this host, and MASTER_ADDR is not set.\n\n"
        "Pass the host of rank 0 to all ranks: mpirun -x MASTER_ADDR=<host> ..."
    )
    assert surroundings(environ | {"MASTER_ADDR": "head"}).address == "head"


def test_the_innermost_launcher_wins() -> None:
    assert surroundings(TORCHRUN | SRUN | MPIRUN).launcher == "torchrun"
    assert surroundings(SRUN | MPIRUN).launcher == "mpi"


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "0"}, f"RANK is '0', but WORLD_SIZE is not set.\n\n{REMEDY}"),
        ({"WORLD_SIZE": "4"}, f"WORLD_SIZE is '4', but RANK is not set.\n\n{REMEDY}"),
        (
            TORCHRUN | {"RANK": "8"},
            f"RANK is 8 and WORLD_SIZE is 8, but ranks run from 0 to WORLD_SIZE - 1.\n\n{REMEDY}",
        ),
        (
            TORCHRUN | {"RANK": "-1"},
            f"RANK is -1 and WORLD_SIZE is 8, but ranks run from 0 to WORLD_SIZE - 1.\n\n{REMEDY}",
        ),
        (TORCHRUN | {"RANK": "one"}, f"RANK is 'one', which is not a whole number.\n\n{REMEDY}"),
        (
            {"RANK": "0", "WORLD_SIZE": "2"},
            f"WORLD_SIZE is 2, but MASTER_ADDR and MASTER_PORT are not set.\n\n{REMEDY}",
        ),
        (
            without(TORCHRUN, "MASTER_PORT"),
            f"WORLD_SIZE is 8, but MASTER_PORT is not set.\n\n{REMEDY}",
        ),
        (
            {"SLURM_PROCID": "1", "SLURM_NTASKS": "2"},
            (
                "Slurm started 2 tasks, and neither SLURM_STEP_NODELIST, SLURM_JOB_NODELIST nor "
                "SLURM_LAUNCH_NODE_IPADDR is set.\n\nSet MASTER_ADDR to the host of rank 0."
            ),
        ),
        (
            {"SLURM_PROCID": "1", "SLURM_STEP_ID": "0"},
            (
                "SLURM_PROCID is '1', but SLURM_NTASKS is not set.\n\n"
                "Start the processes with srun, or unset SLURM_PROCID to run as a world of one."
            ),
        ),
    ],
)
def test_an_inconsistent_environment_is_refused(environ: dict[str, str], message: str) -> None:
    with pytest.raises(LaunchError) as caught:
        surroundings(environ)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("node[3,5-7]", "node3"),
        ("node[001-128],login", "node001"),
        ("r[1-2]n[03-04]-ib0,x", "r1n03-ib0"),
        ("a-b-[9]", "a-b-9"),
    ],
)
def test_first_host(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host


@pytest.mark.parametrize("nodelist", ["", "node[1-2", "node]", "[]"])
def test_a_node_list_without_a_host_is_refused(nodelist: str) -> None:
    with pytest.raises(LaunchError, match="does not name a first host"):
        first_host(nodelist)


@given(st.lists(st.integers(0, 999), min_size=1, max_size=5), st.integers(1, 4))
def test_first_host_of_any_range_list(numbers: list[int], width: int) -> None:
    inside = ",".join(f"{n:0{width}d}-{n + 1:0{width}d}" for n in numbers)
    assert first_host(f"n[{inside}],m[1-2]") == f"n{numbers[0]:0{width}d}"


@given(
    st.dictionaries(
        st.sampled_from(sorted(TORCHRUN | SRUN | MPIRUN)),
        st.sampled_from(["", "0", "1", "2", "4", "-1", "x", "gpu[07-08]", "4294967290"]),
    )
)
def test_any_environment_is_a_world_or_an_error(environ: dict[str, str]) -> None:
    try:
        found = surroundings(environ)
    except LaunchError:
        return
    assert 0 <= found.rank < found.world
    assert found.local_world >= 1


def script(text: str, **environ: str) -> str:
    """Run a script in a process of its own, where no launcher is left in the environment."""
    launchers = ("SLURM", "OMPI", "PMIX", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(launchers)}
    root = str(Path(__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, "-c", text],
        env=clean | environ | {"PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_plain_script_is_a_world_of_one_and_launching_twice_is_launching_once() -> None:
    text = """
import torch, torch.distributed as dist
from parallax.launch import launch
from parallax.errors import LaunchError
here = launch(seed=3, backend="gloo", timeout=60)
group, first = dist.group.WORLD, torch.rand(())
assert launch(seed=3, backend="gloo") == here == launch()
assert dist.group.WORLD is group and torch.equal(torch.rand(()), first)
x = torch.ones(2); dist.all_reduce(x); assert x.tolist() == [1, 1]
try:
    launch(backend="cpu:gloo")
except LaunchError as error:
    print(error)
print(here)
"""
    assert script(text).splitlines() == [
        (
            "launch(backend='cpu:gloo') was asked for, but a process group with "
            f"{gloo_devices()!r} is running."
        ),
        "",
        "Leave out backend=, or call torch.distributed.destroy_process_group() before launch().",
        "Launch(rank=0, world=1, local_rank=0, device=device(type='cpu'))",
    ]


def gloo_devices() -> str:
    return str(torch.distributed.distributed_c10d.BackendConfig(torch.distributed.Backend("gloo")))


def test_a_group_made_elsewhere_is_described() -> None:
    text = """
import torch.distributed as dist
from parallax.launch import launch
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
print(launch().rank, launch().world, launch().device)
"""
    # A broken environment does not matter once the group is there.
    assert script(text, RANK="0") == "0 1 cpu\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to launch on")
def test_nccl_without_gpus_is_refused() -> None:
    text = """
from parallax.launch import launch
from parallax.errors import LaunchError
try:
    launch(backend="nccl")
except LaunchError as error:
    print(error)
"""
    assert script(text) == (
        "The backend 'nccl' needs a GPU for each rank, and this host has 0 for its 1 ranks.\n\n"
        "Leave out backend= to run on the CPU with gloo, or start as many ranks as there are GPUs."
        "\n"
    )


@pytest.mark.gpu
def test_a_world_of_one_on_a_gpu_speaks_nccl_and_gloo() -> None:
    text = """
import torch, torch.distributed as dist
from parallax.launch import launch
here = launch()
assert launch() == here
for device in ("cpu", here.device):
    x = torch.ones(2, device=device); dist.all_reduce(x); assert x.tolist() == [1, 1]
print(here.device, dist.get_backend_config())
"""
    assert script(text) == "cuda:0 cpu:gloo,cuda:nccl\n"


def test_importing_starts_nothing() -> None:
    text = "import torch.distributed as d, parallax.launch; print(d.is_initialized())"
    assert script(text) == "False\n"


@pytest.mark.parametrize("launcher", ["torchrun", "slurm"])
def test_two_processes_meet(launcher: str) -> None:
    text = f"""
import os, subprocess, sys, socket
with socket.socket() as s:
    s.bind(("127.0.0.1", 0)); port = str(s.getsockname()[1])
child = '''
import torch, torch.distributed as dist
from parallax.launch import launch
here = launch(timeout=60, backend="gloo")
x = torch.tensor([here.rank + 1.0]); dist.all_reduce(x)
assert x.item() == 3 and here.world == 2 and here.local_rank == here.rank
'''
common = dict(os.environ, MASTER_ADDR="127.0.0.1", MASTER_PORT=port, GLOO_SOCKET_IFNAME="lo")
def environ(rank):
    if {launcher!r} == "torchrun":
        return dict(common, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    names = dict(SLURM_NTASKS="2", SLURM_STEP_ID="0")
    return dict(common, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank), **names)
ranks = [subprocess.Popen([sys.executable, "-c", child], env=environ(r)) for r in range(2)]
sys.exit(max(rank.wait() for rank in ranks))
"""
    script(text)


def test_the_long_name_is_the_same_function() -> None:
    assert launch_from_torch is launch
