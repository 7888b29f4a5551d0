"""Learning rates and their schedulers."""
