"""The watch: finds out which rank keeps the others waiting, says so once, and ends the job.

Each rank writes its heartbeat (`heartbeat.py`). One watcher a host, a process without PyTorch, reads those of its host,
and looks at the ranks from outside. The watcher beside rank 0 is the hub: it hears the others, and judges.
`trainer run` reads the same heartbeats, and the verdict, from the folder of the job (`job_folder.py`).
"""
