"""Where a command runs: simulated devices, the mesh, the rules, and the other processes of a job."""

import os
from dataclasses import dataclass

import jax

from vocabjax.errors import UserError
from vocabjax.files import cache_folder
from vocabjax.mesh import Layout, make_mesh, parse_mesh, parse_rules


@dataclass(frozen=True)
class Launch:
    """Devices and processes.

    Attributes:
      devices: simulate this many CPU devices (in each process).
      mesh: named axes and their sizes, e.g. data=2,model=4; one may be -1. None: every device along data.
      rules: default or fsdp, and changes to it, e.g. fsdp,vocab=model+data,seq=context.
      multihost: join the other processes of this TPU pod, Slurm, GKE or Open MPI job.
      coordinator: HOST:PORT of process 0, to join processes on plain machines.
      processes: how many there are, with --coordinator.
      process_id: which of them this is, from 0, with --coordinator.
    """

    devices: int | None = None
    mesh: str | None = None
    rules: str = "default"
    multihost: bool = False
    coordinator: str | None = None
    processes: int | None = None
    process_id: int | None = None


def start(launch: Launch, *, one_device: bool = False) -> Layout:
    """The layout to run on. Call it once, before anything touches a device.

    Args:
      one_device: use the first device alone unless devices, a mesh or processes are asked for.

    Raises:
      UserError: a mesh, rules or processes that cannot work.
    """
    axes, rules = parse_mesh(launch.mesh or ""), parse_rules(launch.rules)
    if launch.devices is not None:
        _simulate(launch.devices)
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "jax"))
    joined = _join(launch)
    pool = jax.devices()
    if launch.devices is not None:
        wanted = launch.devices * jax.process_count()
        if len(pool) < wanted:
            raise UserError(
                f"--devices {launch.devices}: JAX has already started with {len(pool)} devices"
            )
        pool = pool[:wanted]
    elif one_device and launch.mesh is None and not joined:
        pool = jax.local_devices()[:1]
    layout = Layout.make(make_mesh(axes, devices=pool), rules)
    layout.require_used()
    return layout


def _simulate(count: int) -> None:
    if count < 1:
        raise UserError(f"--devices {count} must be at least 1")
    # Simulated devices share a pool of as many threads as there are devices or cores, and a thread waits inside a collective.
    # With several collectives of one device in flight, all of them may wait for a device that has no thread left.
    os.environ.setdefault("PJRT_NPROC", str(4 * count))
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:  # called as a library, after JAX started: its devices must do
        return
    jax.config.update("jax_platforms", "cpu")


def _join(launch: Launch) -> bool:
    explicit = (launch.coordinator, launch.processes, launch.process_id)
    stated = any(value is not None for value in explicit)
    if stated and None in explicit:
        raise UserError("--coordinator, --processes and --process-id go together")
    if not stated and not launch.multihost:
        return False
    try:
        jax.distributed.initialize(*explicit)
    except (ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"cannot join the other processes ({reason}); on plain machines give each one --coordinator HOST:PORT "
            "--processes N --process-id I"
        ) from error
    return True
