"""Epilogue graphs in CuTe DSL kernels: what of them can be had, and the code for it."""
