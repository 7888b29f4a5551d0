"""The version, in a file of its own: reading it must import nothing (`importlib.metadata` costs milliseconds)."""

__version__ = "0.1.0"
