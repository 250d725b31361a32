"""From a graph to plans: which kernels compute which nodes."""
