"""Norms of rows and their gradients: what each family offers, and how it is compiled."""

from kernel_api.providers.cutedsl.norm import backward, forward, quantized

__all__ = ["backward", "forward", "quantized"]
