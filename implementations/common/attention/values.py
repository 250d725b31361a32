"""What attention kernels take beside Q, K, V and what they write."""

import cutlass
from cutlass import Float32, Int32

#: Bounds of bands beyond this are none: positions have 32 bits.
_FAR = 2**30


class Values:
    """Tensors and numbers by name; what is absent is None.

    names: In the order of the tuple that kernels pass on.
    """

    def __init__(self, names: tuple[str, ...], given: tuple):
        self._given = dict(zip(names, given, strict=True))

    def __extract_mlir_values__(self) -> list:
        return []  # none of it changes: branches and loops carry nothing of it

    def __new_from_mlir_values__(self, values: list) -> "Values":
        return self

    def __getitem__(self, name: str):
        return self._given.get(name)

    def __contains__(self, name: str) -> bool:
        return name in self._given

    def with_prefix(self, prefix: str) -> dict:
        """Those whose names begin so, without it."""
        return {n.removeprefix(prefix): v for n, v in self._given.items() if n.startswith(prefix)}

    def number(self, name: str) -> Float32:
        return Float32(self[name])

    def integer(self, name: str):
        """A number, or the element of a tensor that has one."""
        value = self[name]
        return value[0] if hasattr(value, "element_type") else value

    def bound(self, name: str) -> Int32:
        """Of a band."""
        value = self[name]
        return Int32(cutlass.min(value, type(value)(_FAR)))

    def longest(self, side: str, rows: Int32) -> Int32:
        """Of packed sequences with so many rows, of queries or keys: those of the longest, or more.
        What is said may be any number that 64 bits hold."""
        said = self[f"max_seqlen_{side}"]
        return Int32(cutlass.min(said, type(said)(rows)))

    def element(self, name: str, *indices):
        """Of a tensor; modes of extent 1 serve every index."""
        tensor = self[name]
        places = (cutlass.min(i, Int32(n) - 1) for i, n in zip(indices, tensor.shape, strict=True))
        return tensor[tuple(places)]
