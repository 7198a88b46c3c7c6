"""Which world a process was started in, read from the environment of torchrun, Open MPI or Slurm.

Pure: the functions here take a mapping and start nothing; `parallax.launch` is the effect.
"""

from __future__ import annotations

import ipaddress
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from parallax.errors import LaunchError

# Slurm numbers the steps that srun did not start (batch script, interactive shell, external) from
# here upwards.
_SLURM_SPECIAL_STEPS = 0xFFFFFFF0

# Below the range from which Linux hands out ports for outgoing connections (32768 and up), above
# the well-known ones.
_FIRST_PORT, _PORTS = 10_000, 20_000


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the environment says about the world, before anything is started.

    Attributes:
        launcher: Who started this process: `"torchrun"`, `"mpi"`, `"slurm"`, or `"none"` for a
            world of one.
        rank: Number of this process.
        world: Number of processes.
        local_rank: Number of this process on its host.
        local_world: Number of processes on this host, at least.
        address: Host of rank 0, None where no rendezvous is needed.
        port: Port of the rendezvous, None where none is needed.
        own_gpu: Whether the launcher shows each process its own GPUs only, so that each counts them
            from 0.
    """

    launcher: str = "none"
    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    address: str | None = None
    port: int | None = None
    own_gpu: bool = False


def surroundings(environ: Mapping[str, str]) -> Surroundings:
    """Read the world from environment variables, without starting anything.

    The most specific launcher wins: torchrun may run under srun, and mpirun starts its daemons
    through srun, so that the variables of the outer launcher are still there and describe something
    else.

    Args:
        environ: The environment, usually `os.environ`.

    Returns:
        The world as the launcher describes it, or a world of one.

    Raises:
        LaunchError: Variables that belong together are missing, are no integers, or contradict each
            other.

    Example:
        >>> surroundings({}).world
        1
        >>> surroundings({"SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"}).world  # a shell inside salloc
        1
        >>> surroundings({"RANK": "2"})
        Traceback (most recent call last):
            ...
        parallax.errors.LaunchError: RANK is '2', but WORLD_SIZE is not set.
        <BLANKLINE>
        Start the processes with torchrun, or unset RANK and WORLD_SIZE to run as a world of one.
    """
    readers: tuple[Callable[[Mapping[str, str]], Surroundings | None], ...] = (
        _from_torchrun,
        _from_mpi,
        _from_slurm,
    )
    for reader in readers:
        found = reader(environ)
        if found is not None:
            return found
    return Surroundings()


def first_host(nodelist: str) -> str:
    """Return the first host of a Slurm node list, the one that rank 0 runs on.

    Args:
        nodelist: Names separated by commas, with ranges in brackets.

    Returns:
        The first name, with its leading zeros kept.

    Raises:
        LaunchError: The list is empty or a bracket is not closed.

    Example:
        >>> first_host("node[07-09,12],gpu3")
        'node07'
        >>> first_host("rack[1-2]n[03,05]-ib")
        'rack1n03-ib'
    """
    # Commas inside brackets separate ranges, not hosts.
    first = re.match(r"(?:[^,\[\]]|\[[^\[\]]+\])+", nodelist.strip())
    if first is None or nodelist.strip()[first.end() :][:1] not in ("", ","):
        raise LaunchError(
            f"The Slurm node list {nodelist!r} does not name a first host.\n\n"
            "Set MASTER_ADDR to the host of rank 0."
        )
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first.group())


def _from_torchrun(environ: Mapping[str, str]) -> Surroundings | None:
    if "RANK" not in environ and "WORLD_SIZE" not in environ:
        return None
    remedy = (
        "Start the processes with torchrun, or unset RANK and WORLD_SIZE to run as a world of one."
    )
    rank, world = _rank_and_world(environ, "RANK", "WORLD_SIZE", remedy)
    address = environ.get("MASTER_ADDR")
    port = _integer(environ, "MASTER_PORT", remedy) if environ.get("MASTER_PORT") else None
    if world > 1:
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environ.get(name)]
        if missing:
            raise LaunchError(
                f"WORLD_SIZE is {world}, but {' and '.join(missing)} {_is(missing)} not set."
                f"\n\n{remedy}"
            )
    # Some launchers start one process per host and say nothing of local ranks; on one host all
    # ranks are local.
    here = address is not None and _is_loopback(address)
    local_rank = _integer(environ, "LOCAL_RANK", remedy, default=rank if here else 0)
    local_world = _integer(
        environ, "LOCAL_WORLD_SIZE", remedy, default=world if here else local_rank + 1
    )
    return Surroundings("torchrun", rank, world, local_rank, local_world, address, port)


def _from_mpi(environ: Mapping[str, str]) -> Surroundings | None:
    rank_name, world_name = "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"
    if rank_name not in environ and world_name not in environ:
        return None
    remedy = (
        f"Start the processes with mpirun, or unset {rank_name} and {world_name} to run as a world "
        "of one."
    )
    rank, world = _rank_and_world(environ, rank_name, world_name, remedy)
    local_rank = _integer(environ, "OMPI_COMM_WORLD_LOCAL_RANK", remedy, default=0)
    local_world = _integer(environ, "OMPI_COMM_WORLD_LOCAL_SIZE", remedy, default=local_rank + 1)
    address = environ.get("MASTER_ADDR") or ("127.0.0.1" if local_world == world else None)
    if address is None:
        raise LaunchError(
            f"mpirun started {world} ranks, {local_world} of them on this host, and MASTER_ADDR is "
            "not set.\n\nPass the host of rank 0 to all ranks: mpirun -x MASTER_ADDR=<host> ..."
        )
    job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid") or ""
    port = _integer(environ, "MASTER_PORT", remedy, default=_port(zlib.crc32(job.encode())))
    return Surroundings("mpi", rank, world, local_rank, local_world, address, port)


def _from_slurm(environ: Mapping[str, str]) -> Surroundings | None:
    remedy = "Start the processes with srun, or unset SLURM_PROCID to run as a world of one."
    if "SLURM_PROCID" not in environ:
        return None
    step_name = "SLURM_STEP_ID" if environ.get("SLURM_STEP_ID") else "SLURM_STEPID"
    step = _integer(environ, step_name, remedy) if environ.get(step_name) else None
    # A batch script and an interactive shell see SLURM_NTASKS of the whole allocation and
    # SLURM_PROCID=0 as well: taken for rank 0, they would wait for ranks that nobody starts. Only
    # srun's own variables tell the two apart.
    if step is not None and step >= _SLURM_SPECIAL_STEPS:
        return None
    by_srun = step is not None or any(
        name in environ
        for name in ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_LAUNCH_NODE_IPADDR")
    )
    if not by_srun and environ["SLURM_PROCID"].strip() == "0":
        return None
    world_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    rank, world = _rank_and_world(environ, "SLURM_PROCID", world_name, remedy)
    local_rank = _integer(environ, "SLURM_LOCALID", remedy, default=0)
    local_world = max(_tasks_here(environ), local_rank + 1)
    # Rank 0 listens, and it runs on the first host of the step; the node that srun was called on
    # may be a login node.
    nodelist = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    address = (
        environ.get("MASTER_ADDR")
        or (first_host(nodelist) if nodelist else None)
        or environ.get("SLURM_LAUNCH_NODE_IPADDR")
    )
    if address is None and world > 1:
        raise LaunchError(
            f"Slurm started {world} tasks, and neither SLURM_STEP_NODELIST, SLURM_JOB_NODELIST "
            "nor SLURM_LAUNCH_NODE_IPADDR is set.\n\nSet MASTER_ADDR to the host of rank 0."
        )
    job = _integer(environ, "SLURM_JOB_ID", remedy, default=0)
    # Two steps of one job may run side by side, so that the step has to count too.
    port = _integer(environ, "MASTER_PORT", remedy, default=_port(31 * job + (step or 0)))
    own_gpu = bool(environ.get("SLURM_GPUS_PER_TASK"))
    return Surroundings("slurm", rank, world, local_rank, local_world, address, port, own_gpu)


def _tasks_here(environ: Mapping[str, str]) -> int:
    """Return the tasks on this node from the run-length coded list, 1 when it is not known."""
    coded = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or ""
    counts: list[int] = []
    for part in coded.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            return 1
        counts += [int(match[1])] * int(match[2] or 1)
    node = environ.get("SLURM_NODEID", "0")
    return counts[int(node)] if node.isdecimal() and int(node) < len(counts) else 1


def _rank_and_world(
    environ: Mapping[str, str], rank_name: str, world_name: str, remedy: str
) -> tuple[int, int]:
    for there, missing in ((rank_name, world_name), (world_name, rank_name)):
        if missing not in environ:
            raise LaunchError(
                f"{there} is {environ[there]!r}, but {missing} is not set.\n\n{remedy}"
            )
    rank, world = _integer(environ, rank_name, remedy), _integer(environ, world_name, remedy)
    if not 0 <= rank < world:
        raise LaunchError(
            f"{rank_name} is {rank} and {world_name} is {world}, but ranks run from 0 to "
            f"{world_name} - 1.\n\n{remedy}"
        )
    return rank, world


def _integer(environ: Mapping[str, str], name: str, remedy: str, default: int = 0) -> int:
    text = environ.get(name)
    if text is None or text == "":
        return default
    try:
        return int(text)
    except ValueError:
        raise LaunchError(f"{name} is {text!r}, which is not a whole number.\n\n{remedy}") from None


def _port(number: int) -> int:
    return _FIRST_PORT + number % _PORTS


def _is(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"
