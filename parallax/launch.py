"""The process group: from torchrun, Open MPI or Slurm, or a world of one.

`parallax.surroundings` reads the environment and holds all the knowledge about launchers; `launch`
is the effect. Importing this module starts nothing.
"""

from __future__ import annotations

import atexit
import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from parallax.errors import LaunchError
from parallax.surroundings import Surroundings, surroundings


@dataclass(frozen=True, slots=True)
class Launch:
    """Where this process stands in the world that `launch` joined.

    Attributes:
        rank: Number of this process, `0 <= rank < world`.
        world: How many processes train together.
        local_rank: Number of this process on its host.
        device: Where this process computes, `cuda:<n>` or `cpu`.
    """

    rank: int
    world: int
    local_rank: int
    device: torch.device


def launch(
    *,
    backend: str | None = None,
    timeout: float | timedelta | None = None,
    seed: int | None = None,
) -> Launch:
    """Join the world this process was started in, so that transforms have ranks to work with.

    Understands torchrun (and anything else that sets `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and
    `MASTER_PORT`), Open MPI's `mpirun` and Slurm's `srun`. A process that nothing launched is a
    world of one: it opens no port and needs no settings. Calling it again, or with a process group
    that already exists, returns the facts and starts nothing.

    Args:
        backend: A backend of torch.distributed, such as `"gloo"` or `"cpu:gloo,cuda:nccl"`. By
            default NCCL for CUDA tensors and gloo for CPU tensors where this host has a GPU for
            each of its ranks, otherwise gloo.
        timeout: How long a collective may wait, in seconds; by default torch's own bound.
        seed: Seeds torch's generators, alike on all ranks so that weights are initialised alike.

    Returns:
        Rank, number of ranks, rank on this host, and the device to compute on.

    Raises:
        LaunchError: The environment contradicts itself, the backend asked for needs GPUs that are
            not there, or the running process group has another backend.

    Example:
        >>> from parallax.launch import launch
        >>> here = launch(seed=0)  # doctest: +SKIP
        >>> here.rank, here.world  # doctest: +SKIP
        (0, 1)
    """
    running = dist.is_initialized()
    if running and backend is not None:
        _check_running(backend)
    found = _running_world() if running else surroundings(os.environ)
    gpu = _gpu(found, dist.get_backend_config() if running else backend)
    if gpu is not None:
        torch.cuda.set_device(gpu)
    if not running:
        chosen = backend or ("gloo" if gpu is None else "cpu:gloo,cuda:nccl")
        _start(found, chosen, timeout, gpu)
    if seed is not None:
        torch.manual_seed(seed)
    device = torch.device("cpu") if gpu is None else torch.device("cuda", gpu)
    return Launch(found.rank, found.world, found.local_rank, device)


launch_from_torch = launch


def _running_world() -> Surroundings:
    rank, world = dist.get_rank(), dist.get_world_size()
    try:
        found = surroundings(os.environ)
    except LaunchError:
        found = Surroundings()
    if (found.rank, found.world) == (rank, world):
        return found
    # Somebody else made the group, with ranks of their own, and all that can be known is the device
    # they chose.
    on_gpu = "nccl" in dist.get_backend_config()
    local_rank = torch.cuda.current_device() if on_gpu else rank
    return Surroundings("none", rank, world, local_rank, local_rank + 1)


def _gpu(found: Surroundings, backend: str | None) -> int | None:
    """Return the index of this rank's GPU, None where the ranks of this host compute on its CPU."""
    if backend is not None and "nccl" not in backend:
        return None
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found.local_world <= gpus:
        return found.local_rank
    if gpus and found.own_gpu:
        return found.local_rank % gpus
    if backend is None:
        return None
    raise LaunchError(
        f"The backend {backend!r} needs a GPU for each rank, and this host has {gpus} for its "
        f"{found.local_world} ranks.\n\nLeave out backend= to run on the CPU with gloo, or start "
        "as many ranks as there are GPUs."
    )


def _check_running(backend: str) -> None:
    running = dist.get_backend_config()
    asked = dist.distributed_c10d.BackendConfig(dist.Backend(backend))  # pyright: ignore[reportArgumentType]
    if str(asked) != running:
        raise LaunchError(
            f"launch(backend={backend!r}) was asked for, but a process group with {running!r} is "
            "running.\n\nLeave out backend=, or call torch.distributed.destroy_process_group() "
            "before launch()."
        )


def _start(
    found: Surroundings, backend: str, timeout: float | timedelta | None, gpu: int | None
) -> None:
    bound = (
        timeout if timeout is None or isinstance(timeout, timedelta) else timedelta(seconds=timeout)
    )
    device = torch.device("cuda", gpu) if gpu is not None and "nccl" in backend else None
    where: dict[str, object]
    if found.world == 1:
        where = {"store": dist.HashStore()}
    elif found.launcher == "torchrun":
        store = _store_of_attempt(found, bound)
        # Not by address: torchrun's agent may already host the store, which only torch's env://
        # rendezvous knows.
        where = {"init_method": "env://"} if store is None else {"store": store}
    else:
        host = f"[{found.address}]" if ":" in str(found.address) else found.address
        where = {"init_method": f"tcp://{host}:{found.port}"}
    dist.init_process_group(
        backend,
        rank=found.rank,
        world_size=found.world,
        timeout=bound,
        device_id=device,
        **where,  # pyright: ignore[reportArgumentType]
    )
    # NCCL complains at exit about groups that were left open.
    atexit.register(_leave, dist.group.WORLD)


def _store_of_attempt(found: Surroundings, bound: timedelta | None) -> dist.Store | None:
    """The store of a job that torchrun started again on its one host; None for any other.

    Its agent keeps one store for all attempts (torch 2.11 to 2.13 take each for a new one), where
    the ranks would find the addresses of those that have died and wait for them.
    """
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    # On several hosts agents count restarts differently, so that the number is no common name.
    if not (attempt and hosted and os.environ.get("GROUP_WORLD_SIZE") == "1"):
        return None
    assert found.address is not None, "torchrun says where its store is"
    assert found.port is not None, "torchrun says where its store is"
    wait = dist.default_pg_timeout if bound is None else bound
    store = dist.TCPStore(found.address, found.port, found.world, is_master=False, timeout=wait)
    return dist.PrefixStore(f"attempt-{attempt}", store)


def _leave(group: dist.ProcessGroup | None) -> None:
    if dist.is_initialized() and dist.group.WORLD is group:
        dist.destroy_process_group()
