"""Attention families; importing this registers them."""

from kernel_api.providers.cutedsl.sdpa import sm80, sm90, sm90_backward, sm90_decode, sm90_mixed

__all__ = ["sm80", "sm90", "sm90_backward", "sm90_decode", "sm90_mixed"]
