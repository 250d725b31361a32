"""Kernels for every GPU from Ampere on: cp.async, ldmatrix, mma.sync."""
