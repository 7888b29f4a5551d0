"""Configuration: option types, options, settings."""
