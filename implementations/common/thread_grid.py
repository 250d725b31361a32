"""How the threads of a block lie on a tile, one vector each, when nothing but they copies it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ThreadGrid:
    """Threads lie `along` the unit-stride mode first, then `across`, and step on across.

    All extents are powers of two. A tile too small for the block leaves threads idle.
    """

    threads: int
    along: int  # elements
    across: int
    vector: int  # elements

    def __post_init__(self):
        if self.along % self.vector or self.threads % self.vectors_along:
            raise ValueError(
                f"{self.threads} threads cannot lie on rows of {self.along} elements, "
                f"{self.vector} elements each"
            )

    @property
    def vectors_along(self) -> int:
        return self.along // self.vector

    @property
    def step(self) -> int:
        """Across, from one vector of a thread to its next."""
        return self.threads // self.vectors_along

    @property
    def copies(self) -> int:
        """Vectors per thread."""
        return max(1, self.across // self.step)

    @property
    def idle_threads(self) -> bool:
        return self.step > self.across

    def first(self, thread) -> tuple:
        """(along, across) of the first element of a thread."""
        return thread % self.vectors_along * self.vector, thread // self.vectors_along
