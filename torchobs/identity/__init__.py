"""Identity of this process: its run, its rank, and the launcher that started it."""
