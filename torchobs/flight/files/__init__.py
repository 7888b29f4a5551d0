"""Flight files in a file system: creation, lock, location, cleanup, control file and artifacts."""
