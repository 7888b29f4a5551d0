"""Memory of devices, of the process and of its container."""
