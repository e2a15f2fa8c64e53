"""Who started this process, and how the ranks and hosts of the job find one another."""
