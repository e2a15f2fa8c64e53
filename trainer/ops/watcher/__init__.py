"""The watchers: one process on each host looks at the ranks of its host, and says which of them hangs.

`python -m trainer.ops.watcher` is a watcher, which `trainer/watch/start.py` starts. It imports no PyTorch, so that it
starts within 0.1 s. Watchers do not talk to each other: `trainer run` compares what they have found out.
"""
