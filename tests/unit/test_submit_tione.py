"""The script that creates a task of TI-ONE, run with a program that stands in for tccli."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.unit.job_files import render, stand_in
from trainer.errors import ConfigError

NODES = ["--nodes", "2", "--ranks-per-node", "2", "--image", "ccr.example/train:1"]
GROUP = ["--directive=ResourceGroupId=rsg-1", "--cpus-per-rank", "4", "--memory", "32GB"]
HOURLY = ["--directive=InstanceType=TI.GN10.5XLARGE80.POST"]
COMMAND = ["--", "python", "train.py", "it's $5", "{x}"]


@pytest.fixture
def tccli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have tccli note its arguments and the request, and answer with what is in the file `answer`."""
    stand_in(
        tmp_path,
        "tccli",
        f'cd {tmp_path}; printf "%s\\n" "$@" > arguments\n'
        'for last; do :; done; cp "${last#file://}" request 2> /dev/null; cat answer',
    )
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "answer").write_text("{}")
    return tmp_path


def created(folder: Path, *options: str) -> Any:
    """Submit the script; return the request that tccli was given."""
    (folder / "job.sh").write_text(render("tione", *NODES, *options, *COMMAND))
    subprocess.run(["bash", "job.sh"], cwd=folder, check=True, timeout=20)
    words = (folder / "arguments").read_text().splitlines()
    assert words[:5] == ["tione", "CreateTrainingTask", "--version", "2021-11-11", "--cli-input-json"]
    assert not Path(words[5].removeprefix("file://")).exists()
    return json.loads((folder / "request").read_text())


def test_a_task_in_a_resource_group(tccli: Path) -> None:
    request = created(tccli, *GROUP, "--gpus-per-node", "2", "--directive=GpuType=V100")
    assert (request["ChargeType"], request["ResourceGroupId"]) == ("PREPAID", "rsg-1")
    assert request["ResourceConfigInfos"] == [
        {"Role": "WORKER", "InstanceNum": 2, "Cpu": 8000, "Memory": 32768, "Gpu": 200, "GpuType": "V100"}
    ]
    assert request["ImageInfo"] == {"ImageType": "CUSTOM", "ImageUrl": "ccr.example/train:1"}
    assert "DataConfigs" not in request


def test_a_task_that_is_paid_by_the_hour(tccli: Path) -> None:
    request = created(
        tccli,
        *HOURLY,
        "--directive=RDMAConfig.Enable=true",
        "--directive=CFSSource.Id=cfs-1",
        "--directive=ImageType=TCR",
        "--directive=RegistryId=tcr-1",
        "--directive=VpcId=vpc-1",
    )
    assert request["ChargeType"] == "POSTPAID_BY_HOUR"
    assert request["ResourceConfigInfos"] == [
        {"Role": "WORKER", "InstanceNum": 2, "InstanceType": "TI.GN10.5XLARGE80.POST", "RDMAConfig": {"Enable": True}}
    ]
    assert (request["ImageInfo"]["ImageType"], request["ImageInfo"]["RegistryId"]) == ("TCR", "tcr-1")
    assert (request["VpcId"], request["DataSource"]) == ("vpc-1", "CFS")
    (config,) = request["DataConfigs"]
    assert (config["MappingPath"], config["CFSSource"]) == ("/trainer/runs", {"Id": "cfs-1", "Path": "/"})


def test_each_node_starts_its_ranks_with_the_command_as_it_is(tccli: Path) -> None:
    request = created(tccli, *HOURLY)
    stand_in(tccli, "torchrun", 'printf "%s\\n" "$@" > ranks')
    env = dict(os.environ, RANK="1", MASTER_ADDR="10.0.0.1", MASTER_PORT="23456", WORLD_SIZE="2")
    subprocess.run(["bash", "-c", request["StartCmdInfo"]["StartCmd"]], cwd=tccli, env=env, check=True, timeout=20)
    words = (tccli / "ranks").read_text().splitlines()
    assert words[-6:] == ["--no-python", "--", "python", "train.py", "it's $5", "{x}"]
    told = dict(zip(words[:12:2], words[1:12:2], strict=True))
    assert told == {
        "--nnodes": "2",
        "--nproc-per-node": "2",
        "--node-rank": "1",
        "--master-addr": "10.0.0.1",
        "--master-port": "23456",
        "--log-dir": "runs/train",
    }


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (NODES, "tione needs one of --directive=ResourceGroupId=rsg-…"),
        ([*NODES, *GROUP, *HOURLY], "tione needs one of"),
        ([*NODES[:4], *HOURLY], "--image is missing"),
        ([*NODES, *HOURLY, "--directive=Cpu=4"], "--directive is 'Cpu=4'; valid are ResourceGroupId,"),
        ([*NODES, *HOURLY, "--directive=VpcId="], "--directive is 'VpcId='"),
        ([*NODES, *HOURLY, "--directive=RDMAConfig.Enable=yes"], "of RDMAConfig.Enable it is true"),
        ([*NODES, *HOURLY, "--time", "2h"], "tione has no --time; its API has no limit"),
        ([*NODES, *HOURLY, "--claim", "a"], "tione has no --claim; runs/ comes from a file system"),
        ([*NODES, *HOURLY, "--name", "a" * 61], "tione takes up to 60 characters"),
    ],
)
def test_what_it_cannot_do_is_refused(options: list[str], problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        render("tione", *options, "--", "python", "train.py")
    assert problem in str(error.value)


def test_without_tccli_a_line_says_so(tmp_path: Path) -> None:
    script = render("tione", *NODES, *HOURLY, *COMMAND)
    env = {"PATH": "/usr/bin:/bin", "TMPDIR": str(tmp_path)}
    done = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True, check=False, timeout=20)
    assert (done.returncode, done.stderr) == (1, "tccli is not installed here; submit where it is\n")


def test_a_value_stays_a_string_of_the_request(tccli: Path) -> None:
    request = created(tccli, *HOURLY, '--directive=VpcId=a"b')
    assert request["VpcId"] == 'a"b'
