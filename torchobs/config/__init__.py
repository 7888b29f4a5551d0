"""Configuration: options, settings, and this process's rank and run."""
