"""Measurements as one HTML page that needs nothing beside itself.

``page`` is a function of the rows and of the performance model alone: the same rows make the same
page. Times are compared within one environment and one problem.
"""

from kernel_api.report._page import page, write

__all__ = ["page", "write"]
