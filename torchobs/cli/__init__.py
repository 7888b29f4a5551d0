"""The programs ``torchobs run``, ``torchobs exporter`` and so on; the only place where all parts meet."""
