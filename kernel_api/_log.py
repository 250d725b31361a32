"""The loggers: children of ``kernel_api``, silent until the application says otherwise."""

from __future__ import annotations

import logging

logging.getLogger("kernel_api").addHandler(logging.NullHandler())


def logger(module: str) -> logging.Logger:
    """The logger of a module of ours."""
    return logging.getLogger(module)
