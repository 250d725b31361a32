"""8-bit floats that kernels of 16-bit ones attend to."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int8, Int32, Int64, const_expr
from cutlass.cute import AddressSpace

from ..conversion import Conversions
from ..flat_grid import flat_block_idx, flat_grid
from .modes import attention_modes
from .sequences import keys_in_pages, sequence_of
from .values import Values

_ROWS, _THREADS = 64, 128  # of a block
_VECTOR = 16  # elements that a thread reads at once


class Widened:
    """Writes rows of 8-bit floats (B,H,S,D), packed (T,H,D) or in pages, in a type of 16 bits, side
    by side: as (B,H,S,D), or packed. Of keys behind a sequence nothing is read or written.

    names: What `Values` of keys are called; of queries, which are written whole, none.
    columns: Of a row, at most.
    hopper: Whether kernels may start while those before still end, and the hardware converts.
    """

    def __init__(
        self,
        element_type: type[cutlass.Numeric],
        names: tuple[str, ...],
        columns: int,
        keys_in_page: int | None = None,
        *,
        hopper: bool,
    ):
        self.element_type = element_type
        self.names = names
        self.across = columns // _VECTOR
        self.keys_in_page = keys_in_page
        self.hopper = hopper
        self.conversions = Conversions(float8=hopper)

    @cute.jit
    def __call__(
        self,
        narrow: cute.Tensor,
        operands,
        address: Int64,
        sequences: Int32,
        stream: cuda.CUstream,
    ):
        """Launches the copy to the address; returns it as a tensor, and the address behind it."""
        packed = cute.rank(narrow) == 3
        narrow = attention_modes(narrow)
        keys, columns, heads, batches = narrow.shape
        if const_expr(self.keys_in_page is not None):
            keys = keys_in_pages(Values(self.names, operands), self.keys_in_page)
            batches = sequences
        row = cute.assume(Int64(columns), divby=_VECTOR)
        if const_expr(packed):
            layout = cute.make_layout((keys, heads, columns), stride=(row * heads, row, 1))
        else:
            layout = cute.make_layout(
                (batches, heads, keys, columns), stride=(row * keys * heads, row * keys, row, 1)
            )
        pointer = cute.make_ptr(self.element_type, address, AddressSpace.gmem, assumed_align=32)
        wide = cute.make_tensor(pointer, layout)
        end = address + row * keys * heads * batches * (self.element_type.width // 8)
        blocks = cute.ceil_div(keys, _ROWS)
        self.kernel(narrow, wide, operands, blocks).launch(
            grid=flat_grid(blocks, heads, batches),
            block=(_THREADS, 1, 1),
            stream=stream,
            use_pdl=self.hopper,
        )
        return wide, end

    @cute.kernel
    def kernel(self, narrow: cute.Tensor, wide: cute.Tensor, operands, blocks: Int32):
        block, head, batch = flat_block_idx(blocks, narrow.shape[2])
        if const_expr(self.hopper):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        values = Values(self.names, operands)
        packed = cute.rank(wide) == 3
        wide = attention_modes(wide)[None, None, head, batch]
        keys, pages = wide.shape[0], None
        if const_expr(not packed):
            keys = sequence_of(values, batch, Int32(0), keys).keys
        if const_expr(self.keys_in_page is None):
            rows = narrow[None, None, head, batch]
        else:
            rows, pages = narrow[None, None, head, None], values["page_table"][batch, None]
        self._widen(rows, pages, wide, block * _ROWS, keys)

    @cute.jit
    def _widen(self, rows, pages, wide, first_key, keys):
        """A block. rows: (S,D), or all pages (S,D,pages), of which `pages` are those of the
        sequence; wide: (S,D)."""
        thread, _, _ = cute.arch.thread_idx()
        count = _ROWS * self.across // _THREADS
        # All loads before the first of them is waited for.
        narrow = cute.make_rmem_tensor((_VECTOR, count), rows.element_type)
        cute.recast_tensor(narrow, Int8).fill(0)
        for i in cutlass.range_constexpr(count):
            key, column = self._place(thread + i * _THREADS, first_key)
            if (key < keys) & (column < wide.shape[1]):
                source = self._row(rows, pages, key).iterator + column
                cute.autovec_copy(_vector(source), narrow[None, i])
        for i in cutlass.range_constexpr(count):
            key, column = self._place(thread + i * _THREADS, first_key)
            if (key < keys) & (column < wide.shape[1]):
                fragment = cute.make_rmem_tensor(_VECTOR, self.element_type)
                self._convert(narrow[None, i], fragment)
                cute.autovec_copy(fragment, _vector(wide[key, None].iterator + column))

    def _convert(self, narrow: cute.Tensor, fragment: cute.Tensor) -> None:
        if self.hopper:
            fragment.store(narrow.load().to(Float32).to(self.element_type))
        else:
            for i in range(_VECTOR):
                fragment[i] = self.conversions.widened(narrow[i]).to(self.element_type)

    def _place(self, vector: Int32, first_key: Int32) -> tuple[Int32, Int32]:
        return first_key + vector // self.across, vector % self.across * _VECTOR

    def _row(self, rows: cute.Tensor, pages: cute.Tensor | None, key: Int32) -> cute.Tensor:
        if pages is None:
            return rows[key, None]
        return rows[key % self.keys_in_page, None, pages[key // self.keys_in_page]]


def _vector(pointer: cute.Pointer) -> cute.Tensor:
    """At a multiple of 16 bytes."""
    address = cute.make_ptr(
        pointer.value_type, pointer.toint(), AddressSpace.gmem, assumed_align=16
    )
    return cute.make_tensor(address, cute.make_layout(_VECTOR))
