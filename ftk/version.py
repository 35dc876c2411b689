"""The version, alone in a file so that `--version` and the build read it without importing anything."""

__version__ = "0.1.0"
