"""The watch: finds out which rank keeps the others waiting, says so once, and ends the job.

Each rank writes marks (`trainer.watch.marks`). One watcher a host, a process without PyTorch, reads those of its host,
and looks at the ranks from outside. The watcher beside rank 0 is the hub: it hears the others, and judges.
"""
