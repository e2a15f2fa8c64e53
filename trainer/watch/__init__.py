"""What each rank does for the watch: it notes what it does now, starts its host's watcher, and says how it has failed.

Each rank writes its heartbeat (`heartbeat.py`), which other processes read: the watcher of its host
(`trainer/ops/watcher/`), and `trainer run`, in the folder of the job (`job_folder.py`).
"""
