"""Settings, and the types of option that environment, command line and `init()` share."""
