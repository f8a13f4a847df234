"""The zrpc broker and its command line.

Imports no torch.  This package is no public API beside the command ``zrpc`` (or
``python -m broker``): scripts import :mod:`zrpc`.
"""

from ._version import __version__

__all__ = ["__version__"]
