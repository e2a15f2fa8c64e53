"""When a run is saved, what a checkpoint holds, and how a run goes on from one."""
