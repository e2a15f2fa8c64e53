"""Gradient buckets, for strategies with an all-reduce of their own.

The backward pass produces gradients one by one, roughly in the reverse order of the parameters. Each is scaled into
its place in a flat bucket. A full bucket is all-reduced as one message while the backward pass goes on. All ranks send
their buckets in the same order, whatever the order of the gradients, which rules out a deadlock. Li et al., "PyTorch
Distributed" (VLDB 2020), sections 3.2.2 and 3.2.3, for both ideas.
"""

from __future__ import annotations

import time
import weakref
from abc import abstractmethod
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor, nn

from trainer.config import RunConfig
from trainer.errors import ConfigError, TrainerError
from trainer.launch.marks import waits
from trainer.launch.world import World
from trainer.strategies.base import NamedParameters, Strategy, Synchronizer, check_dense
from trainer.strategies.buckets import Bucket, make_buckets
from trainer.strategies.gradient_guard import GradientGuard


class BucketedStrategy(Strategy):
    """Base of strategies that only implement the sum of one flat tensor over all ranks."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._reducers: weakref.WeakSet[BucketReducer] = weakref.WeakSet()
        self._background: ThreadPoolExecutor | None = None

    @abstractmethod
    def sum_gradients(self, flat: Tensor) -> None:
        """Sum a bucket over all ranks, in place.

        With several buckets it is called from a background thread, and the strategy's other methods may be called
        at the same time.

        Args:
            flat: one-dimensional, contiguous, on the CPU; the same length and type on every rank.
        """

    @abstractmethod
    def sum_values(self, flat: Tensor) -> None:
        """Sum any other tensor over all ranks, in place; likewise flat, contiguous and on the CPU."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        flat = tensor.detach().contiguous().view(-1).cpu()
        self.sum_values(flat)
        if flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat.view(tensor.shape))
        return tensor

    def send_gradients(self, flat: Tensor, name: str) -> Tensor:
        on_cpu = flat.cpu()
        if self._background is None:
            self.sum_gradients(on_cpu)
        else:  # which may be sending now; messages keep their order
            self._background.submit(self.sum_gradients, on_cpu).result()
        return flat if on_cpu is flat else flat.copy_(on_cpu)

    def start_gradients(self, flat: Tensor, name: str) -> Callable[[], Tensor]:
        if not self._may_overlap():
            return super().start_gradients(flat, name)
        on_cpu = flat.cpu()
        sent = self._exchange_thread().submit(self.sum_gradients, on_cpu)

        def wait() -> Tensor:
            sent.result()
            return flat if on_cpu is flat else flat.copy_(on_cpu)

        return wait

    def prepare(self, model: nn.Module, parameters: NamedParameters, config: RunConfig) -> Synchronizer:
        self._check(model, config)
        self.broadcast_tensors(tensor.data for tensor in (*model.parameters(), *model.buffers()))
        if not parameters:
            return Synchronizer(model)
        held = [parameter for _, parameter in parameters]
        buckets = make_buckets(held, torch.float16 if config.compression == "fp16" else None)
        # A single bucket is full when the backward pass ends, so there is nothing to overlap with.
        if len(buckets) > 1 and self._may_overlap():
            self._exchange_thread()
        # All reducers of a strategy send from the same thread, whichever was prepared first.
        reducer = BucketReducer(
            buckets, self.sum_gradients, scale=1 / self.world.size, executor=lambda: self._background
        )
        self._reducers.add(reducer)
        guard = GradientGuard(parameters, ranks_may_differ=config.dynamic_graph)
        return BucketSynchronizer(model, guard, reducer, self.all_reduce)

    def exchange_seconds(self) -> float | None:
        return sum(reducer.take_seconds() for reducer in self._reducers) if self._reducers else None

    def close(self) -> None:
        if self._background is not None:
            self._background.shutdown()
            self._background = None

    def _exchange_thread(self) -> ThreadPoolExecutor:
        if self._background is None:
            # OpenMP's number of threads is each thread's own, and PyTorch's default would be all cores.
            self._background = ThreadPoolExecutor(1, "exchange", torch.set_num_threads, (torch.get_num_threads(),))
        return self._background

    def _may_overlap(self) -> bool:
        """Return whether `sum_gradients` may be called from another thread."""
        return True

    def _check(self, model: nn.Module, config: RunConfig) -> None:
        name = type(self).__name__.removesuffix("Strategy")
        if config.reduction == "adasum":
            raise ConfigError(f"reduction is 'adasum', which {name} does not have; valid there is average")
        check_dense(model, f"{name} exchanges")


class BucketSynchronizer(Synchronizer):
    """The gradients of one model, in the buckets of a `BucketReducer`."""

    def __init__(
        self, model: nn.Module, guard: GradientGuard, reducer: BucketReducer, all_reduce: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__(model)
        self._reducer, self._guard, self._all_reduce = reducer, guard, all_reduce
        self.retire = reducer.remove_hooks

    def keep_local(self, local: bool) -> None:
        self._reducer.paused = local

    def before_backward(self) -> None:
        if self._reducer.is_sending:
            self._guard.complete(self._wait, self._all_reduce, between_passes=True)
        self._reducer.reopen()

    def after_backward(self) -> None:
        if not self._reducer.paused:
            self._guard.note()

    def finish(self) -> None:
        if not self._reducer.is_done:
            self._guard.complete(self._wait, self._all_reduce)

    def _wait(self, _: object) -> None:
        self._reducer.finish()

    def reopen(self) -> None:
        self._reducer.reopen()


class BucketReducer:
    """Collects gradients in buckets as they become ready, and replaces them by their mean over all ranks.

    Args:
        buckets: each parameter is in one of them.
        all_reduce: sums a flat tensor over all ranks, in place.
        scale: factor on each rank's gradients, one over the world size.
        executor: returns an executor with one thread, which sends buckets in the order of submission, or None to
            send them from the training thread.
    """

    def __init__(
        self,
        buckets: list[Bucket],
        all_reduce: Callable[[Tensor], None],
        *,
        scale: float,
        executor: Callable[[], Executor | None],
    ) -> None:
        self._buckets = buckets
        self._all_reduce = all_reduce
        self._scale = scale
        self._executor = executor
        self._bucket_of = {parameter: bucket for bucket in buckets for parameter in bucket.places}
        self._next = 0
        self.paused = False
        """Whether gradients stay on this rank."""
        self.is_done = False
        """Whether the gradients are the mean over all ranks."""
        self._seconds = 0.0
        # Weakly, because a hook that held the parameters would keep them for ever.
        own = weakref.ref(self)
        self._hooks = [one.register_post_accumulate_grad_hook(partial(_on_gradient, own)) for one in self._bucket_of]

    @property
    def is_sending(self) -> bool:
        """Whether gradients are in the buckets, or on their way, that `finish` has not waited for."""
        return any(bucket.ready for bucket in self._buckets)

    def finish(self) -> None:
        """Send what has not been sent, and wait for all of it. Collective; a second call does nothing."""
        if self.is_done:
            return
        for bucket in self._buckets[self._next :]:
            for parameter in bucket.places.keys() - bucket.ready:
                bucket.put(parameter, self._scale)
            self._send(bucket)
        for bucket in self._buckets:
            if bucket.sent is not None:
                bucket.sent.result()
            bucket.assign_gradients()
        self._next, self.is_done = 0, True

    def take_seconds(self) -> float:
        """Return the seconds spent in all-reduces since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def reopen(self) -> None:
        """Let the next `finish` all-reduce again."""
        self.is_done = False

    def remove_hooks(self) -> None:
        """Leave the parameters alone from now on."""
        for hook in self._hooks:
            hook.remove()

    def on_gradient(self, parameter: Tensor) -> None:
        """Put a gradient into its bucket, and send every bucket that is full and next in order."""
        if self.paused:
            return
        bucket = self._bucket_of[parameter]
        # After an all-reduce all ranks hold the same mean. A further backward pass adds to it, and the sum is
        # all-reduced again.
        self.is_done = False
        if parameter in bucket.ready:
            raise TrainerError(
                "a second backward pass came before optimizer.step(), while the first one's gradients were being "
                "all-reduced; run.backward(loss) waits for them, and loss.backward() does not"
            )
        bucket.put(parameter, self._scale)
        while self._next < len(self._buckets) and self._buckets[self._next].is_full:
            self._send(self._buckets[self._next])
            self._next += 1

    def _send(self, bucket: Bucket) -> None:
        executor = self._executor()
        if executor is None:
            with waits("gradients"):
                self._run_all_reduce(bucket.flat)
        else:
            bucket.sent = executor.submit(self._run_all_reduce, bucket.flat)

    def _run_all_reduce(self, flat: Tensor) -> None:
        started = time.perf_counter()
        self._all_reduce(flat)
        self._seconds += time.perf_counter() - started


def _on_gradient(reducer: weakref.ref[BucketReducer], parameter: Tensor) -> None:
    if (alive := reducer()) is not None:
        alive.on_gradient(parameter)
