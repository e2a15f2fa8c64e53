"""Settings are checked where they are built; the launcher is recognised by what it leaves in the environment."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, get_type_hints

import numpy as np
import pytest

from trainer.cluster.environment import Launch, launches, read_launch
from trainer.config import RunConfig, RunSettings, TrainerConfig
from trainer.errors import ConfigError

RANKS = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
TORCHRUN = {**RANKS, "TORCHELASTIC_RUN_ID": "none"}
HOROVODRUN = {"HOROVOD_RANK": "3", "HOROVOD_SIZE": "4", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "2"}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
# What salloc and sbatch leave for every process of an allocation, and what srun adds for its tasks.
ALLOCATION = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_NNODES": "2", "SLURM_TASKS_PER_NODE": "2(x2)"}
BATCH_SCRIPT = {**ALLOCATION, "SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_LOCALID": "0"}
SRUN = {
    **ALLOCATION,
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_PROCID": "3",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "1",
}
ONE_TASK = {**SRUN, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
BESIDE_MPIRUN = {"OMPI_MCA_orte_hnp_uri": "1.0;tcp://a:1", "OMPI_MCA_orte_local_daemon_uri": "1.0;tcp://a:1"}
ON_ANOTHER_NODE = {**BESIDE_MPIRUN, "OMPI_MCA_orte_local_daemon_uri": "1.1;tcp://b:1"}


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("precision", "fp8", "precision is 'fp8'; valid are fp32, bf16, fp16"),
        ("compression", "zip", "compression is 'zip'; valid are none, fp16, bf16, powersgd, powersgd:RANK (from 1)"),
        ("compression", "powersgd:0", "compression is 'powersgd:0'; valid are none, fp16, bf16, powersgd, powersgd:R"),
        ("full_updates", -1, "full_updates is -1; it must be finite and not negative"),
        ("sync_every", 0, "sync_every is 0; it must be at least 1"),
        ("decay", "steps", "decay is 'steps'; valid are none, cosine"),
        ("device", "tpu", "device is 'tpu'; valid are auto, cpu, cuda"),
        ("batch_size", 0, "batch_size is 0; it must be at least 1"),
        ("accumulate", -1, "accumulate is -1; it must be at least 1"),
        ("warmup_epochs", -0.5, "warmup_epochs is -0.5; it must be finite and not negative"),
        ("clip_norm", 0.0, "clip_norm is 0.0; it must be finite and positive"),
    ],
)
def test_a_value_that_is_not_valid_is_named_with_what_is(name: str, value: Any, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainerConfig(**{name: value})
    assert str(caught.value).startswith(expected)


@pytest.mark.parametrize(
    "setting", [setting.name for setting in dataclasses.fields(TrainerConfig) if setting.name != "fsdp"]
)
@pytest.mark.parametrize("value", ["abc", [1]])
def test_a_value_of_another_kind_is_named(setting: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{setting} is {re.escape(repr(value))}; (it must be|valid are) "):
        TrainerConfig(**{setting: value})


def test_a_truth_value_is_no_number_and_numbers_of_numpy_are() -> None:
    with pytest.raises(ConfigError, match="accumulate is True; it must be an integer"):
        TrainerConfig(accumulate=True)
    TrainerConfig(accumulate=np.int64(2), clip_norm=np.float32(0.5))  # type: ignore[arg-type]


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        TrainerConfig(batch_size=0, precision="fp8", seed=-1)
    assert [problem.split(" is ")[0] for problem in str(caught.value).split("; ") if " is " in problem] == [
        "precision",
        "seed",
        "batch_size",
    ]


@pytest.mark.parametrize("setting", [{"compression": "powersgd:2"}, {"sync_every": 4}])
def test_what_sends_less_does_not_go_with_a_loss_scale(setting: dict[str, Any]) -> None:
    TrainerConfig(**setting)
    [(name, value)] = setting.items()
    with pytest.raises(ConfigError, match=f"^{name} is '?{value}'?, which does not go with precision 'fp16'"):
        TrainerConfig(**setting, precision="fp16")


@pytest.mark.parametrize(
    ("launcher", "environment"),
    [
        ("torchrun", TORCHRUN),
        ("horovodrun", HOROVODRUN),
        ("mpirun", MPIRUN),
        ("srun", SRUN),
        # A launcher inside an allocation, or inside one big srun task, speaks louder than Slurm.
        ("torchrun", {**ONE_TASK, **TORCHRUN}),
        ("horovodrun", {**ONE_TASK, **HOROVODRUN}),
        ("mpirun", {**ONE_TASK, **MPIRUN}),
        # The daemon of mpirun that srun has started on another node.
        ("mpirun", {**SRUN, "SLURM_PROCID": "0", **MPIRUN, **ON_ANOTHER_NODE}),
        # What a wrapper leaves empty is not set.
        ("srun", {**SRUN, **dict.fromkeys({**TORCHRUN, **HOROVODRUN, **MPIRUN}, "")}),
        ("mpirun", {**BATCH_SCRIPT, **MPIRUN}),
        # horovodrun calls mpirun, and says so.
        ("horovodrun", {**MPIRUN, "HOROVOD_LAUNCHER": "horovodrun"}),
        # One torchrun on each node, whoever started it there, and what is left of the nodes after a failure.
        ("torchrun", {**SRUN, **TORCHRUN, "GROUP_WORLD_SIZE": "4"}),
        ("torchrun", {**MPIRUN, **TORCHRUN, "GROUP_WORLD_SIZE": "4"}),
        ("torchrun", {**SRUN, **TORCHRUN, "GROUP_WORLD_SIZE": "1", "TORCHELASTIC_RESTART_COUNT": "1"}),
        ("torchrun", {**MPIRUN, **TORCHRUN, "OMPI_COMM_WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "1"}),
        # A script, or trainer.init, hands the launcher's rank on in torchrun's variables.
        *(
            (launcher, {**given, **RANKS})
            for launcher, given in (("mpirun", MPIRUN), ("horovodrun", HOROVODRUN), ("srun", SRUN))
        ),
        # MPICH's mpiexec, whose script hands the rank on.
        ("torchrun", {**RANKS, "PMI_RANK": "3", "PMI_SIZE": "4"}),
        # What an image or an operator has set for another job.
        ("horovodrun", {**HOROVODRUN, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}),
        # Scripts hand one launcher's rank on in another one's variables.
        ("horovodrun", {**MPIRUN, **HOROVODRUN}),
    ],
)
def test_each_launcher_is_recognised(launcher: str, environment: dict[str, str]) -> None:
    assert read_launch(environment) == Launch(launcher=launcher, rank=3, size=4, local_rank=1, local_size=2)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        dict.fromkeys({**TORCHRUN, **HOROVODRUN, **MPIRUN, **SRUN, "PMI_SIZE": ""}, ""),
        ALLOCATION,
        BATCH_SCRIPT,
        # What operators of clusters set for torch.distributed's own rendezvous, without torchrun's local ranks.
        {name: value for name, value in MPIRUN.items() if "LOCAL" not in name},
    ],
    ids=["plain", "empty", "salloc", "sbatch", "half of mpirun"],
)
def test_plain_python_is_a_world_of_one(environment: dict[str, str]) -> None:
    assert read_launch(environment) == Launch()


@pytest.mark.parametrize("environment", [{"RANK": "1", "WORLD_SIZE": "2"}, {"PMI_SIZE": "2", "PMI_RANK": "1"}])
def test_a_half_known_launcher_is_refused_instead_of_training_alone(environment: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="_SIZE is 2"):
        read_launch(environment)


@pytest.mark.parametrize("environment", [{**TORCHRUN, "WORLD_SIZE": "two"}, {**SRUN, "SLURM_NODEID": "two"}])
def test_a_variable_of_a_launcher_that_is_no_number_is_named(environment: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"^(WORLD_SIZE|SLURM_NODEID) is 'two'; a number is valid"):
        read_launch(environment)


@pytest.mark.parametrize(
    ("environment", "outer"),
    [
        ({**HOROVODRUN, **TORCHRUN, "GROUP_WORLD_SIZE": "1"}, "torchrun with 4 and horovodrun with 4"),
        ({**MPIRUN, **TORCHRUN, "GROUP_WORLD_SIZE": "1"}, "torchrun with 4 and mpirun with 4"),
        ({**SRUN, **TORCHRUN, "GROUP_WORLD_SIZE": "1"}, "torchrun with 4 and srun with 4"),
        ({**MPIRUN, **HOROVODRUN, "OMPI_COMM_WORLD_RANK": "0"}, "horovodrun with 4 and mpirun with 4"),
        ({**MPIRUN, **HOROVODRUN, "HOROVOD_SIZE": "1", "HOROVOD_RANK": "0"}, "horovodrun with 1 and mpirun with 4"),
        ({**SRUN, **HOROVODRUN, "SLURM_PROCID": "0"}, "horovodrun with 4 and srun with 4"),
        ({**SRUN, **MPIRUN, "SLURM_PROCID": "0", **BESIDE_MPIRUN}, "mpirun with 4 and srun with 4"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", **HOROVODRUN}, "horovodrun with 4 and mpiexec with 2"),
    ],
)
def test_a_launcher_in_the_ranks_of_another_is_refused(environment: dict[str, str], outer: str) -> None:
    with pytest.raises(ConfigError, match=f"^{outer} processes are nested") as error:
        read_launch(environment)
    # Who reaches the store of a c10d rendezvous runs code.
    assert "c10d" not in str(error.value)
    assert {launch.launcher for launch in launches(environment)} == {outer.split()[0], outer.split()[-3]}


@pytest.mark.parametrize(
    ("tasks_per_node", "node", "local_size"), [("4", 0, 4), ("2(x3),1", 2, 2), ("2(x3),1", 3, 1), ("3,1(x2)", 2, 1)]
)
def test_srun_counts_the_tasks_of_this_node(tasks_per_node: str, node: int, local_size: int) -> None:
    environment = {**SRUN, "SLURM_STEP_TASKS_PER_NODE": tasks_per_node, "SLURM_NODEID": str(node)}
    assert read_launch(environment).local_size == local_size


def test_the_settings_of_init_have_the_types_of_the_fields() -> None:
    assert get_type_hints(RunSettings) == get_type_hints(RunConfig)
