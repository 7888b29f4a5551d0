"""Short programs that show what the toolboxes are for."""
