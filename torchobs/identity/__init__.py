"""Which rank of which run this process is, and which launcher started it."""
