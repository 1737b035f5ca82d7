"""Which rank this process is, where torchrun or Slurm's srun has started all of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from vmserve.errors import ConfigurationError
from vmserve.options import rules

__all__ = ["Placement", "placement"]

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
#: Default port of torchrun.
_PORT = 29500
_HIGHEST_PORT = 65535


@dataclass(frozen=True, slots=True)
class Placement:
    """``local_rank``: among the ranks of this host; ``host`` and ``port``: where ranks meet, on the
    host of rank 0."""

    rank: int
    size: int
    local_rank: int
    host: str
    port: int


def placement(environ: Mapping[str, str], tensor_parallel_size: int) -> Placement | None:
    """Read the launcher's variables; None if there was none, and ranks are still to be started.

    torchrun's come first: srun may have started it. Slurm's are those of a step; in a batch script
    outside of srun there is one process, however many tasks the job has.

    Raises :class:`~vmserve.errors.ConfigurationError` for variables that are incomplete, wrong, or
    of another number of ranks than ``tensor_parallel_size``.
    """
    if tensor_parallel_size == 1:
        return None
    if "RANK" in environ or "WORLD_SIZE" in environ:
        launcher, names = "torchrun", ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        _require(environ, launcher, _TORCHRUN)
        host = environ["MASTER_ADDR"]
    elif "SLURM_STEP_NUM_TASKS" in environ:
        launcher, names = "srun", ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
        nodes = "SLURM_STEP_NODELIST" if "SLURM_STEP_NODELIST" in environ else "SLURM_JOB_NODELIST"
        _require(environ, launcher, names if "MASTER_ADDR" in environ else (*names, nodes))
        host = environ.get("MASTER_ADDR") or first_host(environ[nodes], nodes)
    else:
        return None
    rank, size, local_rank = (_number(environ, name) for name in names)
    rules.check(
        {
            "tensor_parallel_size": tensor_parallel_size,
            "launcher": launcher,
            "other_size": size if size != tensor_parallel_size else 0,
            "size_name": names[1],
        }
    )
    if not local_rank <= rank < size:
        raise ConfigurationError(
            f"{launcher} says that this is rank {rank:,} of {size:,} ({names[0]}, {names[1]}) and "
            f"number {local_rank:,} on its host ({names[2]}), which cannot be: were they changed?"
        )
    port = _number(environ, "MASTER_PORT") if "MASTER_PORT" in environ else _PORT
    if not 1 <= port <= _HIGHEST_PORT:
        raise ConfigurationError(f"MASTER_PORT is {port:,}: it must be 1 to {_HIGHEST_PORT:,}")
    return Placement(rank, size, local_rank, host, port)


def first_host(nodes: str, name: str = "SLURM_JOB_NODELIST") -> str:
    """Return the first host of Slurm's list: ``rack1n[03-05,9],x`` begins with ``rack1n03``."""
    found = re.match(r"(?:[\w.-]|\[\w[\w,-]*\])+", nodes)
    if found is None:
        raise ConfigurationError(f"{name} is {nodes!r}, which names no host: set MASTER_ADDR")
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", found[0])


def _require(environ: Mapping[str, str], launcher: str, names: tuple[str, ...]) -> None:
    if missing := [name for name in names if not environ.get(name)]:
        raise ConfigurationError(
            f"{launcher} seems to have started this process, but {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set: start all ranks with {launcher}, or "
            "unset its variables"
        )


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ[name]
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise ConfigurationError(f"{name} is {text!r}: it must be a number, 0 or more")
    return int(text)
