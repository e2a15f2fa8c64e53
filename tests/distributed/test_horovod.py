"""Starting Horovod: for an ordinary user, on hosts that differ, and with options that look like its own."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.distributed.harness import BIN, ROOT, run_job

RANK_LINE = (
    "import horovod.torch as hvd; hvd.init(); print(f'rank {hvd.rank()} of {hvd.size()} mpi={hvd.mpi_enabled()}')"
)


@pytest.mark.needs("root")  # which alone can become somebody else
@pytest.mark.parametrize("controller", ["--mpi", pytest.param("--gloo", marks=pytest.mark.slow)])
def test_both_controllers_start_for_an_ordinary_user(controller: str) -> None:
    home = Path(tempfile.mkdtemp(prefix="trainer-user-"))  # pytest's own folders are closed to other users
    shutil.chown(home, "nobody")
    # Root's Python often lies under root's home. Being allowed to read there makes nobody no less ordinary
    # to Open MPI; but mpirun looks at the mode of the program that it starts, hence the shell.
    readable = "+dac_read_search"
    user = ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups"]
    user += [f"--inh-caps={readable}", f"--ambient-caps={readable}"]
    program = f"exec {shlex.quote(str(BIN / 'python'))} -c {shlex.quote(RANK_LINE)}"
    try:
        done = subprocess.run(
            [*user, str(BIN / "horovodrun"), controller, "-np", "2", "sh", "-c", program],
            env={"PATH": f"{BIN}:/usr/bin:/bin", "HOME": str(home), "TMPDIR": str(home)},
            cwd=home, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
    finally:
        shutil.rmtree(home)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("of 2 mpi=") == 2


def test_another_pytorch_than_the_compiled_one_is_named_before_the_library_is_loaded() -> None:
    script = (
        "import torch; torch.__version__ = torch.torch_version.TorchVersion('2.99.0')\n"
        "import trainer; trainer.init('horovod', device='cpu')"
    )
    outcome = run_job("python", 1, ["-c", script])
    assert outcome.code == 78
    assert "this Horovod was compiled against PyTorch 2." in outcome.output
    assert "and PyTorch here is 2.99.0; compile it anew with pip install" in outcome.output
    assert "Traceback" not in outcome.output


def test_horovods_build_names_what_it_lacks(tmp_path: Path) -> None:
    (tmp_path / "version.txt").write_text("0.28.1+trainer.1")
    shutil.copy(ROOT / "third_party/horovod/overlay/setup.py", tmp_path)
    without = (
        "import importlib.metadata as metadata, runpy, sys\n"
        "def version(name): raise metadata.PackageNotFoundError(name)\n"
        "metadata.version, sys.argv = version, ['setup.py', 'egg_info']\n"
        "runpy.run_path('setup.py')"
    )
    command = [sys.executable, "-c", without]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "horovod: PyTorch is not installed here" in done.stderr.splitlines()[-1]


def test_a_scripts_own_options_reach_it_whatever_they_begin_with() -> None:
    """One of our patches; a Horovod without them takes `--network` for its `--network-interfaces`."""
    show = "import sys, json; print('args ' + json.dumps(sys.argv[1:]))"
    outcome = run_job("horovodrun-gloo", 1, ["-c", show, "--network", "tutorial", "--verb", "--hosts", "x"])
    line = next(line for line in outcome.output.splitlines() if "args " in line)
    assert json.loads(line.split("args ", 1)[1]) == ["--network", "tutorial", "--verb", "--hosts", "x"]
