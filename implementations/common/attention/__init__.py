"""What the attention kernels of all architectures share."""
