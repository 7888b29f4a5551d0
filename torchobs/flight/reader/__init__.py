"""The exporter's side of the flight file: every offset is checked, every block counts by its checksum."""
