"""TMA descriptors of matrices that lie anywhere, made by a small kernel before they are used.

The matrices have one layout; a descriptor of each is a copy of one that the host has made, with its
own address.
"""

import cuda.bindings.driver as cuda
import cutlass.cute as cute
import cutlass.tensor_utils as tensor_utils
from cutlass import Int32, Int64
from cutlass.cute import AddressSpace
from cutlass.cute.nvgpu import cpasync

from ..common.expert_matrices import ExpertMatrices
from ..common.threads import WARP

BYTES = 128

_PLACES = tensor_utils.TensorMapManager(tensor_utils.TensorMapUpdateMode.GMEM, BYTES)


def descriptor_of(first: Int64, expert: Int32) -> cute.Pointer:
    """For a copy, from the address of the first descriptor."""
    return _PLACES.get_tensormap_ptr(_place(first, expert), AddressSpace.generic)


def _place(first: Int64, expert: Int32) -> cute.Pointer:
    address = first + Int64(expert) * BYTES
    return cute.make_ptr(Int64, address, AddressSpace.gmem, assumed_align=BYTES)


class Descriptors:
    """Writes one per expert; a warp makes it."""

    def __init__(self, experts: ExpertMatrices):
        self.experts = experts

    @cute.jit
    def __call__(
        self,
        tma: cute.CopyAtom,
        addresses: cute.Tensor,
        shape: tuple,
        pitch: Int64,
        first: Int64,
        stream: cuda.CUstream,
    ):
        """tma: Of a matrix of this shape and pitch; first: address of the first descriptor."""
        self.kernel(tma, addresses, shape, pitch, first).launch(
            grid=(addresses.shape[0], 1, 1), block=(WARP, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, tma: cute.CopyAtom, addresses: cute.Tensor, shape, pitch, first):
        expert, _, _ = cute.arch.block_idx()
        place = _place(first, expert)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        with cute.arch.elect_one():
            cpasync.copy_tensormap(tma, place)
        cute.arch.sync_warp()
        cute.arch.fence_acq_rel_cta()
        own = self.experts.at(addresses[expert], shape, pitch)
        cpasync.update_tma_descriptor(tma, own, _PLACES.get_tensormap_ptr(place, AddressSpace.gmem))
        cute.arch.sync_warp()
        cpasync.fence_tma_desc_release()
