"""The installed version of this package, for Join.program_version."""

from importlib.metadata import PackageNotFoundError, version

try:
    PROGRAM_VERSION = version("paramserver")
except PackageNotFoundError:  # run from a checkout that was not installed
    PROGRAM_VERSION = "unknown"
