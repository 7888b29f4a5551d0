"""The flight file: a rank's last steps, cumulative metrics and events, readable whatever happened to the process."""
