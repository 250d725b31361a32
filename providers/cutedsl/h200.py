"""What the models of kernels that move memory know of the GPU that they were fitted to."""

#: Bytes per second that a copy reads and writes, and that are read from L2.
BANDWIDTH, L2_BANDWIDTH = 4.3e12, 6e12

#: Of a multiprocessor, as of those of most GPUs: threads and registers that it has room for, and
#: CTAs at most.
THREADS, REGISTERS, MOST_CTAS = 2048, 64 * 1024, 32
