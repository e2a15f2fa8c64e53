"""What a run reports: progress on the terminal, and its record in a folder."""
