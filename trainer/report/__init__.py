"""What a run tells: progress, the terminal, and the record in a folder."""
