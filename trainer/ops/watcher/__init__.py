"""The watchers: one process on each host looks at its ranks, and the one beside rank 0 says which rank hangs.

`python -m trainer.ops.watcher` is a watcher, which `trainer/watch/start.py` starts. It imports no PyTorch, so that it
starts within 0.1 s. The watcher beside rank 0 is the hub, the others are its spokes.
"""
