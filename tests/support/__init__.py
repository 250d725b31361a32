"""What the tests share: data, throwaway kernels, Hypothesis strategies, machine code."""
