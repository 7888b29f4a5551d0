"""The rank's side of the flight file."""
