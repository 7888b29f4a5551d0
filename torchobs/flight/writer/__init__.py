"""Writing of flight files, in the training process."""
