"""Attention of few queries to many keys of 8-bit floats, for Hopper."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float16, Float32, Int8, Int32
from cutlass.cute.nvgpu import OperandMajorMode
from cutlass.cute.nvgpu.warpgroup import OperandSource
from cutlass.tensor_utils import LayoutEnum

from ..common.attention.scores import Place, Tile
from ..common.threads import GROUP
from .mma import WGMMA_M
from .sdpa_decode import SdpaDecode
from .sdpa_fp8 import Descaled
from .sdpa_output import OWN
from .sdpa_parts import DecodeTiles
from .sdpa_tiles import Work

_VECTOR = 16  # bytes
_SLAB = 64  # 16-bit columns of a swizzle
_OTHER_BANKS = 5  # of rows whose numbers differ in these bits: of a slab of 8 bits, and of 16


class Memory(NamedTuple):
    """flag: Whether a block completes a tile; values: of a block of keys, in 16 bits."""

    flag: cute.Pointer
    values: cute.Pointer


class Converted(NamedTuple):
    """Values of a block of keys: as they arrive, in 16 bits, and these as operand of a product.

    loaded: (keys, columns, stages)
    stored: (keys, columns)
    """

    loaded: cute.Tensor
    stored: cute.Tensor
    tCrV: cute.Tensor


class SdpaDecodeFp8(Descaled, SdpaDecode):
    """`SdpaDecode` of 8-bit floats: wgmma reads 8-bit operands along K alone, so a consumer writes
    the values of a block of keys to shared memory in 16 bits, which hold them exactly, while its
    scores of the next block are formed. P has 16 bits as well.

    resident: Blocks of a multiprocessor: one's consumer converts while the other's multiplies.
    """

    def __init__(self, *design, **options):
        super().__init__(*design, **options)
        if self.tile_m != WGMMA_M:
            raise ValueError(f"one group converts for {WGMMA_M} rows, not {self.tile_m}")
        self.powers_type = Float16
        self.exchanged = self.tile_n * self.head_dim_v * Float16.width // 8

    def _key_head(self, place: Place | Tile, tiles: DecodeTiles) -> Int32:
        return place.head

    def _mma_pv(self) -> cute.TiledMma:
        return sm90.make_trivial_tiled_mma(
            *(Float16, Float16, OperandMajorMode.K, OperandMajorMode.MN),
            *(Float32, (1, 1, 1), (WGMMA_M, self.head_dim_v), OperandSource.RMEM),
        )

    def _shared_layouts(self) -> tuple:
        """V lies as K does."""
        q_layout, k_layout, _, o_layout = super()._shared_layouts()
        tile = (self.tile_m, self.tile_n, self.head_dim_v)
        v_layout = sm90.make_smem_layout_b(
            LayoutEnum.ROW_MAJOR, tile, self.element_type, self.stages
        )
        return q_layout, k_layout, v_layout, o_layout

    def _staged_output(self, storage, layout) -> Memory:
        return Memory(storage.flag.data_ptr(), storage.exchange.data_ptr())

    def _parts_of_products(self, consumer, thread, sQ, sK, sV, memory: Memory) -> tuple:
        """V is `Converted`."""
        rows = sm90.make_smem_layout_b(
            LayoutEnum.ROW_MAJOR, (self.tile_m, self.tile_n, self.head_dim_v), Float16, 1
        )
        columns = sm90.make_smem_layout_b(
            LayoutEnum.COL_MAJOR, (self.tile_m, self.head_dim_v, self.tile_n), Float16, 1
        )
        pointer = cute.recast_ptr(memory.values, swizzle_=rows.inner, dtype=Float16)
        stored = cute.make_tensor(pointer, rows.outer)[None, None, 0]
        across = cute.make_tensor(pointer, columns.outer)
        fragments, registers, local = super()._parts_of_products(
            consumer, thread, sQ, sK, across, memory
        )
        tCrQ, tCrK, tCrV = fragments
        converted = Converted(sV, stored, tCrV[None, None, None, 0])
        return (tCrQ, tCrK, converted), registers, local

    def _await_values(self, values: Converted, pipeline_v, state) -> cute.Tensor:
        pipeline_v.consumer_wait(state)
        self._convert(values, state.index)
        return values.tCrV

    @cute.jit
    def _convert(self, values: Converted, stage):
        """By all threads of the group. Eight neighbours have the vectors of one slab of two rows,
        which differ in what is swizzled so that neither reads nor writes meet in a bank."""
        lane = cute.arch.thread_idx()[0] % GROUP
        read, write = (
            cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), element, num_bits_per_copy=128)
            for element in (self.element_type, Float16)
        )
        slabs = self.head_dim_v // _SLAB
        # Other warps may still multiply those of the block before.
        cute.arch.barrier(barrier_id=OWN, number_of_threads=GROUP)
        for i in cutlass.range_constexpr(self.tile_n * self.head_dim_v // _VECTOR // GROUP):
            pair = (lane // 8 + i * (GROUP // 8)) // slabs
            slab = (lane // 8 + i * (GROUP // 8)) % slabs
            row = pair // 4 * 8 + (pair % 4 ^ lane % 8 // 4 * _OTHER_BANKS)
            column = slab * (_SLAB // _VECTOR) + lane % 4
            narrow = cute.make_rmem_tensor(_VECTOR, self.element_type)
            source = cute.local_tile(values.loaded, (1, _VECTOR, 1), (row, column, stage))
            cute.copy(read, source[0, None, 0], narrow)
            wide = cute.make_rmem_tensor((_VECTOR // 2, 2), Float16)
            wide.store(narrow.load().to(Float16).reshape(wide.shape))
            for half in cutlass.range_constexpr(2):
                place = (row, 2 * column + half)
                target = cute.local_tile(values.stored, (1, _VECTOR // 2), place)
                cute.copy(write, wide[None, half], target[0, None])
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=OWN, number_of_threads=GROUP)

    @cute.jit
    def _clear_behind(self, thread, sV, block, sequence, pipeline_v, v_state):
        first_behind = sequence.keys - block * self.tile_n
        if first_behind < self.tile_n:
            pipeline_v.consumer_wait(v_state)
            stage = cute.recast_tensor(sV, Int8)[None, None, v_state.index]
            behind = (self.tile_n - first_behind) * self.head_dim_v
            for i in cutlass.range(thread, behind, GROUP, unroll=1):
                row, column = i // self.head_dim_v, i % self.head_dim_v
                stage[first_behind + row, column] = Int8(0)
            cute.arch.barrier(barrier_id=OWN, number_of_threads=GROUP)

    @cute.jit
    def _combine(self, thread, memory: Memory, mO, work: Work, values, tiles):
        # `super` is not known where code is traced.
        SdpaDecode._combine(self, thread, memory.flag, mO, work, values, tiles)
