"""float32 as a sum of two tfloat32, so that three products have nearly its precision.

x = large + small, 11 bits each: wgmma cuts float32 off after the first 11 bits by itself, so the
large part is x as it is, and only the small parts need room of their own. A · B is then
small · large + large · small + large · large, and misses 2⁻²¹ of a product at most (Ootomo and
Yokota, Recovering single precision accuracy from Tensor Cores, 2022).
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute import AddressSpace

VECTOR = 4  # elements that a thread reads at once
SMALL_BUFFERS = 2  # one is made while wgmma may still read the other

_LARGE = ~0x1FFF  # bits of a float32 that a tfloat32 has


@dataclass(frozen=True)
class FloatSplitter:
    """Makes the small parts of a stage, in the same places as the elements have there.

    Args:
        elements: Of a tile of A and one of B.
        threads: That make them together.
    """

    elements: tuple[int, int]
    threads: int

    @cute.jit
    def split(self, tiles: tuple, stage: Int32, buffer: Int32, barrier_id: Int32):
        """small[buffer] = what wgmma cuts off from the stage, for wgmma of all threads to read.

        tiles: pointers to (all stages, their small parts), in shared memory, for A and B;
        barrier_id: a named barrier of the threads.
        """
        thread = cute.arch.thread_idx()[0] % self.threads
        for i in cutlass.range_constexpr(len(tiles)):
            elements = self.elements[i]
            source, small = tiles[i]
            source, small = source + stage * elements, small + buffer * elements
            for first in cutlass.range_constexpr(0, elements, VECTOR * self.threads):
                self._split_vector(source, small, first + thread * VECTOR, elements)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=barrier_id, number_of_threads=self.threads)

    @cute.jit
    def _split_vector(self, source, small, first, elements: cutlass.Constexpr):
        if first < elements:
            values = cute.make_rmem_tensor(VECTOR, Float32)
            cute.autovec_copy(_vector(source, first), values)
            for j in cutlass.range_constexpr(VECTOR):
                values[j] = _small(values[j])
            cute.autovec_copy(values, _vector(small, first))


@cute.jit
def _small(x: Float32) -> Float32:
    large = (x.bitcast(Int32) & _LARGE).bitcast(Float32)
    rest = Float32(0.0)
    if x != large:  # also keeps an infinity from being subtracted from itself
        rest = x - large
    return Int32(cute.arch.cvt_f32_tf32(rest)).bitcast(Float32)


def _vector(pointer: cute.Pointer, first: Int32) -> cute.Tensor:
    address = pointer.toint() + first * 4
    vector = cute.make_ptr(Float32, address, AddressSpace.smem, assumed_align=16)
    return cute.make_tensor(vector, cute.make_layout(VECTOR))
