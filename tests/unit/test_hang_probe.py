"""A look at a process from outside, and the conclusions from its stacks."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import trainer
from trainer.cluster.processes import children_cpu_s, look
from trainer.ops.watcher.job import WORKS, Settings, View
from trainer.ops.watcher.judge import Verdict
from trainer.ops.watcher.ranks import LocalRank, LocalRanks, excuse_of, read_stacks, takes_signal, wait_for_stacks
from trainer.ops.watcher.watcher import Watcher
from trainer.watch import heartbeat
from trainer.watch.heartbeat import SIGNAL, State
from trainer.watch.job_folder import JobVerdict, parse_verdict, remove_verdict, write_verdict
from trainer.watch.stack import Frame, collective_of, main_frames, place_of

# Computes in C and never lets go of the interpreter's lock.
SPINS = "import faulthandler, os, sys; f = os.memfd_create('s'); faulthandler.register(int(sys.argv[1]), file=f)\n"
SPINS += "def spin():\n    sum(range(10 ** 12))\nprint(f, flush=True)\nspin()\n"
# Joins as rank 0 of a job, and sleeps.
JOINS = """
import time
from trainer.watch import heartbeat
heartbeat.report_join(0)
print(heartbeat.open_record(0), flush=True)
time.sleep(60)
"""
SITE = "/usr/lib/python3.11/site-packages"


def frame(path: str, name: str = "call") -> Frame:
    return Frame(path, 1, name)


@pytest.fixture
def spinning() -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process that holds the lock, and its file of stacks."""
    command = [sys.executable, "-S", "-c", SPINS, str(int(SIGNAL))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        number = process.stdout.readline().strip()
        yield process, Path(f"/proc/{process.pid}/fd/{number}")
        process.kill()


def test_a_process_that_holds_the_interpreters_lock_tells_its_stack(
    spinning: tuple[subprocess.Popen[str], Path],
) -> None:
    process, path = spinning
    with path.open("rb") as file:
        deadline, stacks = time.monotonic() + 10, ""
        while "in spin\n" not in stacks and time.monotonic() < deadline:  # it has just begun
            before = os.fstat(file.fileno()).st_size
            assert takes_signal(process.pid)
            process.send_signal(SIGNAL)
            wait_for_stacks({file.fileno(): before})
            stacks = read_stacks(file.fileno(), before)
        assert "in spin\n" in stacks
    assert look(process.pid).cpu_s > 0


def test_a_process_that_is_stopped_or_gone_is_told(spinning: tuple[subprocess.Popen[str], Path]) -> None:
    process, _ = spinning
    os.kill(process.pid, 19)
    deadline = time.monotonic() + 5
    while look(process.pid).state != "T" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert look(process.pid).state == "T"
    process.kill()
    process.wait()
    assert look(process.pid).state == "X"


def test_a_process_without_the_handler_takes_no_signal_that_would_end_it() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        assert not takes_signal(process.pid)
        process.kill()


def test_the_main_threads_frames_are_found_without_those_that_only_note() -> None:
    stacks = """Thread 0x00007f0000000001 (most recent call first):
  File "/x/pool.py", line 3 in work

Current thread 0x00007f00000000a2 (most recent call first):
  File "/x/trainer/watch/heartbeat.py", line 190 in call
  File "/home/me/train.py", line 12 in load
"""
    assert main_frames(stacks, 0x7F00000000A2) == [Frame("/home/me/train.py", 12, "load")]
    assert main_frames(stacks, 0x7F00000000A3) == []
    assert str(Frame("/home/me/train.py", 12, "load")) == 'File "/home/me/train.py", line 12, in load'


@pytest.mark.parametrize(
    ("path", "excuse"),
    [
        (f"{SITE}/torch/_inductor/async_compile.py", "compiles"),
        (f"{SITE}/torch/_dynamo/convert_frame.py", "compiles"),
        # A compiled model that runs.
        (f"{SITE}/torch/_dynamo/eval_frame.py", ""),
        (f"{SITE}/torch/_inductor/output_code.py", ""),
        (f"{SITE}/torch/_functorch/_aot_autograd/runtime_wrappers.py", ""),
        (f"{SITE}/torch/serialization.py", WORKS),
        (f"{SITE}/torch/distributed/checkpoint/filesystem.py", WORKS),
        ("/home/me/serialization.py", ""),
        ("/usr/lib/python3.11/pdb.py", "debugger"),
        (f"{SITE}/debugpy/server/api.py", "debugger"),
        ("/home/me/my_pdb.py", ""),
    ],
)
def test_a_compiler_a_debugger_and_a_file_are_recognized(path: str, excuse: str) -> None:
    frames = [frame("/usr/lib/python3.11/subprocess.py"), frame(path)]
    assert excuse_of(frames, frames) == excuse


def test_it_may_be_another_thread_that_compiles_but_none_that_saves() -> None:
    elsewhere = [frame(f"{SITE}/torch/_inductor/compile_fx.py"), frame(f"{SITE}/torch/serialization.py")]
    assert excuse_of([], elsewhere) == "compiles"
    assert excuse_of([], elsewhere[1:]) == ""


def test_collectives_that_no_mark_tells_of_are_recognized() -> None:
    backward = frame(f"{SITE}/torch/autograd/graph.py")
    assert collective_of([backward]) == "gradients"
    assert collective_of([frame("/home/me/train.py"), backward]) == ""
    assert collective_of([frame(f"{SITE}/torch/nn/parallel/distributed.py")]) == "gradients"
    # These compute and write, whatever they wait for in between.
    assert collective_of([frame(f"{SITE}/torch/distributed/checkpoint/filesystem.py")]) == ""
    assert collective_of([frame(f"{SITE}/torch/distributed/tensor/_dispatch.py")]) == ""
    assert collective_of([]) == ""


C10D, LOGGER = "torch/distributed/distributed_c10d.py", "torch/distributed/c10d_logger.py"
FULLY_SHARD, MPI_OPS = "torch/distributed/fsdp/_fully_shard/_fsdp_state.py", "horovod/torch/mpi_ops.py"
DDP, FUNCTION, BACKWARD = "torch/nn/parallel/distributed.py", "torch/autograd/function.py", "torch/autograd/graph.py"
FUNCTIONS = "torch/nn/modules/_functions.py"


@pytest.mark.parametrize(
    ("calls", "what"),
    [
        ([(C10D, "barrier"), (LOGGER, "wrapper")], "torch.distributed.barrier"),
        (
            [(C10D, "all_gather"), (LOGGER, "wrapper"), (C10D, "all_gather_object"), (LOGGER, "wrapper")],
            "torch.distributed.all_gather_object",
        ),
        (
            [(C10D, "all_reduce"), ("train.py", "backward"), (FUNCTION, "apply"), (BACKWARD, "x")],
            "torch.distributed.all_reduce",
        ),
        ([(DDP, "_pre_forward"), (DDP, "forward"), ("trainer/strategies/ddp.py", "forward")], "DDP's forward pass"),
        ([(DDP, "backward"), (FUNCTION, "apply"), (BACKWARD, "x")], "gradients"),
        ([(C10D, "all_gather"), (FULLY_SHARD, "_pre_forward")], "fully_shard's forward pass"),
        ([(C10D, "reduce_scatter"), (FULLY_SHARD, "post_backward"), (BACKWARD, "x")], "gradients"),
        (
            [(MPI_OPS, "synchronize"), (MPI_OPS, "forward"), (FUNCTION, "apply"), (MPI_OPS, "allreduce")],
            "horovod.torch.allreduce",
        ),
        ([(C10D, "all_gather"), (LOGGER, "wrapper"), (FUNCTIONS, "forward")], "SyncBatchNorm's forward pass"),
        ([(MPI_OPS, "synchronize"), ("horovod/torch/sync_batch_norm.py", "backward")], "SyncBatchNorm's backward pass"),
    ],
)
def test_a_collective_has_the_name_of_what_the_user_has_called(calls: list[tuple[str, str]], what: str) -> None:
    frames = [frame(f"{SITE}/{path}", name) for path, name in [*calls, ("../../train.py", "train")]]
    assert collective_of(frames) == what


def test_the_place_of_a_rank_is_the_innermost_line_of_the_users_own() -> None:
    library = trainer.__file__
    theirs = [frame(f"{SITE}/torch/x.py"), frame(library), frame("/usr/lib/python3.11/threading.py")]
    assert place_of([*theirs, Frame("/home/me/trainer/model.py", 31, "forward"), frame("/home/me/train.py")]) == (
        "model.py:31"
    )
    assert place_of(theirs) == ""


@pytest.mark.parametrize("computes", [True, False])
def test_children_that_compute_are_seen(computes: bool) -> None:
    loop = "import time\nprint(flush=True)\nwhile True: " + ("pass" if computes else "time.sleep(1)")
    with subprocess.Popen([sys.executable, "-S", "-c", loop], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        try:
            before = children_cpu_s(os.getpid())
            time.sleep(0.5)
            assert (children_cpu_s(os.getpid()) - before > 0.04) is computes
        finally:
            child.kill()


@pytest.fixture
def own_rank() -> Iterator[LocalRank]:
    """This process as rank 0."""
    yield LocalRank(0, str(heartbeat.open_record(0)))
    heartbeat.close_record()


@pytest.mark.parametrize(
    ("path", "phase", "seen"),
    [
        ("/home/me/train.py", "training", (State.BETWEEN, "")),
        ("/home/me/train.py", "saving", (State.BETWEEN, WORKS)),
        (f"{SITE}/torch/serialization.py", "training", (State.BETWEEN, WORKS)),
        (f"{SITE}/torch/_inductor/async_compile.py", "training", (State.BETWEEN, "compiles")),
        ("/usr/lib/python3.11/pdb.py", "saving", (State.BETWEEN, "debugger")),
        (f"{SITE}/torch/distributed/distributed_c10d.py", "saving", (State.WAITING, "")),
    ],
)
def test_what_a_stack_excuses(
    own_rank: LocalRank, monkeypatch: pytest.MonkeyPatch, path: str, phase: str, seen: tuple[int, str]
) -> None:
    stacks = f'Thread 0x{threading.get_ident():016x} (most recent call first):\n  File "{path}", line 1 in call\n'
    monkeypatch.setattr("trainer.ops.watcher.ranks.read_stacks", lambda *_: stacks)
    heartbeat.report_phase(phase)
    view = own_rank.with_stacks(0, children_work=False)
    assert (view.state, view.excuse) == seen


@pytest.mark.parametrize("share", [0.05, 0.5])
def test_a_rank_whose_loader_computes_is_at_work(
    own_rank: LocalRank, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    began = time.monotonic()
    monkeypatch.setattr("trainer.ops.watcher.ranks.children_cpu_s", lambda _: share * (time.monotonic() - began))
    ranks = LocalRanks({})
    ranks.by_rank[0] = own_rank
    monkeypatch.setattr("trainer.ops.watcher.ranks.wait_for_stacks", lambda _: time.sleep(0.3))
    monkeypatch.setattr(own_rank, "ask", lambda: 0)
    assert ranks.views_with_stacks()[0].excuse == (WORKS if share > 0.1 else "")


@pytest.mark.parametrize("cpu", [0.0, 0.98])
def test_a_rank_in_a_backward_pass_waits_unless_it_computes(
    own_rank: LocalRank, monkeypatch: pytest.MonkeyPatch, cpu: float
) -> None:
    frames = [frame(f"{SITE}/torch/autograd/graph.py")]
    monkeypatch.setattr("trainer.ops.watcher.ranks.main_frames", lambda *_: frames)
    own_rank.view()
    own_rank._cpu = cpu
    view = own_rank.with_stacks(0, children_work=False)
    assert (view.what, view.excuse) == (("gradients", "") if cpu == 0.0 else ("", WORKS))


def test_ranks_are_ended_and_why_is_noted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRAINER_JOB", "abc")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with subprocess.Popen([sys.executable, "-c", JOINS], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        ranks = LocalRanks({0: process.stdout.readline().decode().strip()})
        watcher = Watcher(Settings("a", 1, None, 1800.0, "job"), ranks)
        watcher.verdict = Verdict(("no progress",), (0,))
        watcher.end()
        assert process.wait(timeout=5) == -signal.SIGTERM
    (file,) = tmp_path.glob("*/verdict.json")
    assert parse_verdict(file.read_text()) == JobVerdict("hang", "no progress", (0,))
    write_verdict("waits", "the gradients of step 8")
    remove_verdict()
    assert not file.exists()


def test_a_rank_is_seen_with_its_heartbeat_and_its_stacks() -> None:
    stacks = os.memfd_create("stacks")
    record = str(heartbeat.open_record(1, stacks))
    faulthandler.register(SIGNAL, file=stacks, all_threads=True)
    try:
        ranks, views = LocalRanks({1: record}), list[View]()
        with heartbeat.waits("broadcast"):
            thread = threading.Thread(target=lambda: views.extend(ranks.views_with_stacks().values()))
            thread.start()
            thread.join()
        (view,) = views
        assert (view.what, view.rank) == ("broadcast", 1)
        assert any("test_a_rank_is_seen" in line for line in view.frames)
        assert not ranks.are_gone
        # The heartbeat of another rank, as where a number of a descriptor has been used again.
        assert list(LocalRanks({5: record}).problems) == [5]
    finally:
        faulthandler.unregister(SIGNAL)
        heartbeat.close_record()
        os.close(stacks)
