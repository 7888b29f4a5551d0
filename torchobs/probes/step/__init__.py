"""Steps, backward passes, loss and phases."""
