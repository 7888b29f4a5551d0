"""Configuration: options, settings, and which rank of which run this process is."""
