"""Element-wise kernels: what the family offers, and how it is compiled."""

from kernel_api.providers.cutedsl.elementwise import sm80

__all__ = ["sm80"]
