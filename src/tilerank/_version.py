"""The package's version; read by the build without importing anything else."""

__version__ = "0.1.0"
