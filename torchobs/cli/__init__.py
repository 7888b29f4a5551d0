"""The command line programs ``torchobs run``, ``torchobs exporter`` etc., which combine all parts of the package."""
