"""What flight files tell of a run afterwards: read from the files, worked out by pure functions, said in words."""
