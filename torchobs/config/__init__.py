"""What torchobs can be told, and how: option types, options, settings."""
