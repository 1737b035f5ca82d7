"""Variables of torchrun and Slurm, as documented by both."""

from __future__ import annotations

import pytest

from vmserve.errors import ConfigurationError
from vmserve.parallel.launched import Placement, first_host, placement

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "4000",
}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_NODELIST": "n[07-09]",
}


GIVEN = {"MASTER_ADDR": "gate", "MASTER_PORT": "5000"}


@pytest.mark.parametrize(
    ("variables", "ranks", "expected"),
    [
        ({}, 2, None),
        (GIVEN, 2, None),
        # A batch script of Slurm, outside of srun.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"}, 4, None),
        (TORCHRUN, 1, None),  # one rank needs none
        (TORCHRUN, 4, Placement(3, 4, 1, "10.0.0.1", 4000)),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "2"} | TORCHRUN, 4, Placement(3, 4, 1, "10.0.0.1", 4000)),
        (SLURM, 4, Placement(3, 4, 1, "n07", 29500)),
        (SLURM | {"SLURM_STEP_NODELIST": "n[08-09]"}, 4, Placement(3, 4, 1, "n08", 29500)),
        (SLURM | GIVEN, 4, Placement(3, 4, 1, "gate", 5000)),
    ],
)
def test_placement(variables: dict[str, str], ranks: int, expected: Placement | None) -> None:
    assert placement(variables, ranks) == expected


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("gpu-a.site[003-007,010],x", "gpu-a.site003"),
        ("n[1,3]", "n1"),
        ("rack[1-2]n[3-4]", "rack1n3"),
        ("n[5-6]-ib", "n5-ib"),
    ],
)
def test_first_host(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


@pytest.mark.parametrize("nodes", ["", "[", ",n1", "[]"])
def test_no_host(nodes: str) -> None:
    with pytest.raises(ConfigurationError, match="names no host: set MASTER_ADDR"):
        first_host(nodes)


@pytest.mark.parametrize(
    ("variables", "ranks", "words"),
    [
        ({"RANK": "0"}, 2, "WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT are not set"),
        ({**TORCHRUN, "MASTER_PORT": ""}, 4, "MASTER_PORT is not set: start all ranks with torch"),
        (TORCHRUN, 2, r"torchrun has started 4 processes \(WORLD_SIZE\), but .* is 2: make them"),
        (SLURM, 8, r"srun has started 4 processes \(SLURM_STEP_NUM_TASKS\), but"),
        ({**TORCHRUN, "RANK": "4"}, 4, r"rank 4 of 4 .* which cannot be"),
        ({**TORCHRUN, "RANK": "0"}, 4, r"rank 0 of 4 .* number 1 on its host"),
        ({**TORCHRUN, "RANK": "-1"}, 4, "RANK is '-1': it must be a number"),
        ({**TORCHRUN, "WORLD_SIZE": "٤"}, 4, "WORLD_SIZE is '٤'"),
        ({**TORCHRUN, "MASTER_PORT": "70000"}, 4, "MASTER_PORT is 70,000: it must be 1 to 65,535"),
        ({**SLURM, "SLURM_JOB_NODELIST": ""}, 4, "SLURM_JOB_NODELIST is not set"),
    ],
)
def test_what_cannot_be(variables: dict[str, str], ranks: int, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        placement(variables, ranks)
