"""Parts that several kernels share: one file per idea."""
