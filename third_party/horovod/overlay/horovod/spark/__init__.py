"""Horovod on Spark, which this build refuses."""

from horovod.runner.util import closed

closed.refuse("horovod.spark")
