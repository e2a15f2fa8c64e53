"""Horovod on Ray, which this build refuses."""

from horovod.runner.util import closed

closed.refuse("horovod.ray")
