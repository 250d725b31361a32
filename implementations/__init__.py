"""The kernels themselves, in CuTe DSL. They know nothing of the API that offers them."""
