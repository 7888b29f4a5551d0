"""Memory of device, process and container."""
