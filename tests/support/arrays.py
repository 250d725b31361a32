"""Arrays of other libraries."""


class Array:
    """It has the protocol of DLPack, and nothing else: no shape, no dtype."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack__(self, **how):
        return self.tensor.__dlpack__(**how)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()
