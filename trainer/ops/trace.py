"""`trainer trace`: run a training script as it is, and write a timeline of all its ranks.

The library records nothing of this by itself. A clock is put around what the strategy sends, what its loaders draw, and
PyTorch's backward passes; PyTorch calls back at steps of optimizers, and the heartbeat at what it notes.
"""

from __future__ import annotations

import argparse
import json
import runpy
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.cluster import exit_codes
from trainer.cluster.network import machine_id
from trainer.cluster.output import print_line
from trainer.files import check_writable, write_atomically
from trainer.watch.heartbeat import State, observe

if TYPE_CHECKING:
    from trainer.data.base import Loader, Step
    from trainer.strategies.base import Strategy

_MOST_SPANS = 200_000
"""Spans that a rank keeps, the latest ones: some 20,000 steps with one message each, and 40 MB."""
_MOST_IN_FILE = 2_000_000
"""Spans of all ranks in a file, which then has some 250 MB; a browser shows no more."""
_ROUNDS = 20
"""Barriers by which clocks of other machines are compared."""
_LOOP, _MESSAGE, _PHASE = "loop", "messages", "phase"
_PHASES = 1_000_000
"""Added to a rank's number, it is the number of its phases' track."""
_EPILOG = """\
examples:
  horovodrun -np 4 -H a:2,b:2 trainer trace trace.json examples/mnist.py --epochs 1
  torchrun --nproc-per-node 2 --no-python -- trainer trace trace.json train.py

https://ui.perfetto.dev shows the file; nothing of it is sent there. See docs/trace.md.
"""
_now = time.monotonic_ns


Span = tuple[str, str, int, int, int]
"""Something that a rank did: its track, name, beginning and end in nanoseconds of the rank's own monotonic clock, and
bytes, 0 if none were sent. A plain tuple, because the garbage collector lets go of those alone."""
Moment = tuple[int, int]
"""The same moment in nanoseconds of the rank's own monotonic clock and of rank 0's."""


class Timeline:
    """What this rank does, as it does it, and the file that gets the timelines of all ranks.

    Args:
        file: gets them, on rank 0; of a rank that fails, a file beside it.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._followed: list[Strategy] = []
        self._open: Strategy | None = None
        """The last of them, until it is closed."""
        self._moments: list[Moment] = []
        """At the beginning and, once there is one, at the end."""
        self._spans: deque[Span] = deque(maxlen=_MOST_SPANS)
        self._wait: tuple[str, int] | None = None
        self._phase: tuple[str, int] | None = None
        self._steps: list[int] = []
        self._free_ns = _now()
        """When the loop's last span has ended. What it does from then to a backward pass is the forward pass."""

    def follow(self, strategy: Strategy) -> Strategy:
        """Record what a strategy does from now on. Collective.

        Raises:
            ConfigError: the file cannot be written.
        """
        if strategy in self._followed:
            return strategy
        if strategy.world.is_root:
            check_writable(self._file)
        if not self._followed:
            self._moments.append(_same_moment(strategy))
            observe(strategy.world.rank, self._on_state, self._on_phase)
            _follow_pytorch(self)
        self._open = strategy
        self._followed.append(strategy)
        follow_loader, start, close = strategy.follow_loader, strategy.start_gradients, strategy.close

        def follow_loader_traced(loader: Loader) -> None:
            follow_loader(loader)
            through = loader.through
            loader.through = lambda steps: self._loading(through(steps))

        def start_traced(flat: Any, name: str) -> Callable[[], object]:
            began, wait = _now(), start(flat, name)

            def wait_traced() -> object:
                result = wait()
                self.add_message(began, flat.nbytes)
                return result

            return wait_traced

        def close_traced() -> None:
            if strategy is self._open:
                self.end(failed=sys.exc_info()[0] is not None)  # as in `finally: run.close()`
            close()

        vars(strategy).update(follow_loader=follow_loader_traced, start_gradients=start_traced, close=close_traced)
        _follow_horovod(self)
        return strategy

    def end(self, *, failed: bool) -> None:
        """Write the timelines of all ranks, or that of this rank if it has failed. Collective, unless it has.

        A second call does nothing, unless another strategy has been followed since.
        """
        strategy, self._open = self._open, None
        if strategy is None:
            if not self._followed and not failed:
                print_line("trainer trace: no timeline, because no rank has joined a job in this process", sys.stderr)
            return
        rank = strategy.world.rank
        if not failed:
            try:
                events = self._gather(strategy)
            except Exception as error:  # a script may have ended its process group; its training is done all the same
                reason = str(error).partition("\n")[0]
                print_line(f"trainer trace: the ranks cannot exchange their timelines any more: {reason}", sys.stderr)
                failed = True
            else:
                if strategy.world.is_root:
                    _save(self._file, events)
        if failed:
            _save(self._file.with_stem(f"{self._file.stem}.rank-{rank}"), [self._events(rank)])

    def _gather(self, strategy: Strategy) -> list[bytes]:
        """Return the events of all ranks, on rank 0. Collective."""
        world = strategy.world
        self._moments[1:] = [_same_moment(strategy)]
        mine = self._events(world.rank, _MOST_IN_FILE // world.size)
        found = []
        for rank in range(world.size):  # in turns, because nobody else has to keep them
            sent = strategy.broadcast_object(mine if rank == world.rank else None, root=rank)
            if world.is_root:
                found.append(sent)
        return found

    def backward(self, run: Callable[..., None], *args: Any, **options: Any) -> None:
        """Run a backward pass. What came before it, since the loop's last span, is the forward pass."""
        began = _now()
        self._add("forward", self._free_ns, began)
        run(*args, **options)
        self._add("backward", began, _now())

    def before_step(self, *_: object) -> None:
        self._free_ns = _now()  # a step with a closure has passes of its own
        self._steps.append(self._free_ns)

    def after_step(self, *_: object) -> None:
        self._add("step", self._steps.pop(), _now())

    def add_message(self, began_ns: int, size: int) -> None:
        """Note that this rank has the sum of a message, which may have been there earlier."""
        self._spans.append((_MESSAGE, "gradients", began_ns, _now(), size))

    def _on_state(self, state: int, what: str) -> None:
        """Note what the heartbeat notes: that this rank waits, or does so no longer."""
        now = _now()
        if self._wait is not None:
            self._add(*self._wait, now)
        self._wait = (what, now) if state == State.WAITING else None

    def _on_phase(self, phase: str) -> None:
        """Note that another phase begins, such as a checkpoint."""
        if self._phase is not None and phase == self._phase[0]:
            return
        now = _now()
        if self._phase is not None:
            self._spans.append((_PHASE, *self._phase, now, 0))
        self._phase = (phase, now)

    def _loading(self, steps: Iterator[Step]) -> Iterator[Step]:
        """Yield a loader's steps, and note how long each takes to draw."""
        while True:
            began = _now()
            step = next(steps, None)
            self._add("data", began, _now())
            if step is None:
                return
            yield step

    def _add(self, name: str, began_ns: int, ended_ns: int) -> None:
        self._spans.append((_LOOP, name, began_ns, ended_ns, 0))
        self._free_ns = ended_ns

    def _events(self, rank: int, most: int = _MOST_SPANS) -> bytes:
        """Return this rank's latest spans as events of the Trace Event Format, in JSON, without the list's brackets."""
        # Close what is still open.
        self._on_state(State.BETWEEN, "")
        self._on_phase("")
        self._phase = None
        events = list(_events(rank, list(self._spans)[-most:], self._moments))
        return json.dumps(events, separators=(",", ":")).encode()[1:-1]


def _events(rank: int, spans: Sequence[Span], moments: Sequence[Moment]) -> Iterator[dict[str, Any]]:
    """Yield spans as events, whose times are microseconds since the first of the moments."""
    yield _metadata(rank, "process_name", name=f"rank {rank} on {socket.gethostname()}")
    yield _metadata(rank, "process_sort_index", sort_index=rank)
    # To Perfetto, the thread with the process's number is its first, and thread 0 is process 0's alone.
    threads = {_LOOP: rank, _PHASE: _PHASES + rank}
    for track, thread in threads.items():
        yield {**_metadata(rank, "thread_name", name=track), "tid": thread}
    (began_here, began_at_root), (ended_here, ended_at_root) = moments[0], moments[-1]
    took_here, took_at_root = (ended_here - began_here) or 1, (ended_at_root - began_at_root) or 1
    for number, (track, name, *times, size) in enumerate(spans):
        # Whole nanoseconds: with differences of fractions, bars overlap by one, which Perfetto reports as an error.
        began, ended = ((time_ns - began_here) * took_at_root // took_here for time_ns in times)
        event = {"name": name, "pid": rank, "ts": began / 1e3}
        if track != _MESSAGE:
            yield {**event, "ph": "X", "tid": threads[track], "dur": (ended - began) / 1e3}
            continue
        # Messages overlap, which only asynchronous events may.
        message = {**event, "cat": _MESSAGE, "id2": {"local": number}}
        yield {**message, "ph": "b", "args": {"bytes": size}}
        yield {**message, "ph": "e", "ts": ended / 1e3}


def _save(file: Path, parts: Sequence[bytes]) -> None:
    try:
        write_atomically(file, b'{"displayTimeUnit":"ms","traceEvents":[' + b",".join(parts) + b"]}")
    except OSError as error:  # neither hides what has ended the script, nor fails one that has done its work
        print_line(f"trainer trace: {file} cannot be written: {error.strerror or error}", sys.stderr)
        return
    print_line(f"trainer trace: wrote {file}; https://ui.perfetto.dev shows it", sys.stderr)


def _follow_pytorch(timeline: Timeline) -> None:
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    backward = torch.Tensor.backward

    def backward_traced(*args: Any, **options: Any) -> None:
        timeline.backward(backward, *args, **options)

    setattr(torch.Tensor, "backward", backward_traced)  # noqa: B010 (mypy lets nobody assign a method)
    register_optimizer_step_pre_hook(timeline.before_step)
    register_optimizer_step_post_hook(timeline.after_step)


def _follow_horovod(timeline: Timeline) -> None:
    """Record the messages that Horovod's own optimizer sends and waits for."""
    horovod = sys.modules.get("horovod.torch.optimizer")
    if horovod is None or hasattr(horovod.allreduce_async_, "__wrapped__"):  # by an earlier call
        return

    sent: dict[Any, tuple[int, int]] = {}
    wait = horovod.synchronize

    def sends(send: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(send)
        def call(tensors: Any, *args: Any, **options: Any) -> Any:
            began = _now()  # not afterwards: another rank may have the sum by then
            handle = send(tensors, *args, **options)
            group = tensors if isinstance(tensors, Sequence) else [tensors]
            sent[handle] = (began, sum(tensor.nbytes for tensor in group))
            return handle

        return call

    def synchronize(handle: Any) -> Any:
        result = wait(handle)
        if handle in sent:
            timeline.add_message(*sent.pop(handle))
        return result

    vars(horovod).update(
        allreduce_async_=sends(horovod.allreduce_async_),
        grouped_allreduce_async_=sends(horovod.grouped_allreduce_async_),
        synchronize=synchronize,
    )


def _same_moment(strategy: Strategy) -> Moment:
    """Return a moment by this rank's clock and by rank 0's, where it is the same number on all ranks. Collective.

    All ranks leave a barrier at about the same time. Processes of one machine share the clock.
    """
    machines, times = zip(*strategy.all_gather_object((machine_id(), _now())), strict=True)
    if len(set(machines)) == 1:
        return times[0], times[0]
    left = []
    for _ in range(_ROUNDS):
        strategy.barrier()
        left.append(_now())
    by_rank = strategy.all_gather_object(left)
    here = by_rank[machines.index(machine_id())]
    ahead = sorted(local - root for local, root in zip(here, by_rank[0], strict=True))[_ROUNDS // 2]
    return times[0] + ahead, times[0]


def _metadata(rank: int, kind: str, **args: Any) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": rank, "args": args}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `trace` to the subcommands."""
    parser = subparsers.add_parser(
        "trace",
        help="run a script, and write a timeline of all its ranks",
        description="Run a training script as it is, on each rank, and write a timeline of all ranks, for Perfetto.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("file", type=Path, help="gets the timeline, as JSON, when the script has ended")
    parser.add_argument("script", type=_script, help="a training script, without python before it")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own")


def _script(text: str) -> Path:
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"{text!r} is no file; valid is the path of a Python script")
    return Path(text)


def trace(parsed: argparse.Namespace) -> int:
    """Run the script; return 0. What ends the script, such as an exception, ends this as it would end the script."""
    from trainer import strategies  # which imports PyTorch

    timeline = Timeline(parsed.file)
    strategies.wrapper = timeline.follow
    sys.path[0], sys.argv = str(parsed.script.resolve().parent), [str(parsed.script), *parsed.arguments]
    failed = True
    try:
        runpy.run_path(str(parsed.script), run_name="__main__")
        failed = False
    except SystemExit as ended:
        failed = ended.code not in (None, 0, exit_codes.PREEMPTED)  # all ranks are preempted at the same update
        raise
    finally:
        timeline.end(failed=failed)
    return 0
