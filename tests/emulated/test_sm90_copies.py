"""Operands that TMA cannot read: copied in aligned pieces wherever they begin, in the emulator."""

import functools
import re

import pytest
import torch
from support.kernels import generated_by
from support.ptx.kernel import EmulatedKernel
from support.ptx.problems import awkward_arguments
from support.sampling import some

from kernel_api import provider

pytestmark = pytest.mark.compile

(CUTEDSL,) = provider.providers(["cutedsl"])
#: Family, and what is in a kernel's name: elements of 2, 4 and 1 bytes, contiguous along K or not.
FAMILIES = {
    "16 bits, along K": ("sm90.gemm_repacked", "_f32_tnt_tile64x64x64_cluster1x1", 2),
    "16 bits, along M and N": ("sm90.gemm_repacked", "_f32_ntt_tile64x64x64_cluster1x1", 2),
    "32 bits": ("sm90.gemm_tf32_repacked", "_tnt_tile64x64x32_cluster1x1", 4),
    "8 bits": ("sm90.gemm_int8_repacked", "i32_i32_tnt_tile64x64x128_cluster1x1", 1),
    "8 bits, one turned": ("sm90.gemm_int8_repacked", "i32_i32_nnt_tile64x64x128_cluster1x1", 1),
}
#: Rows shorter than a piece; of 16 bits longer than 512 bytes; several tiles of a copy; batches.
SIZES = ((5, 3, 3, 1), (70, 67, 259, 1), (140, 65, 9, 2))


@functools.cache
def kernel_of(name):
    family, part, size = FAMILIES[name]
    (found,) = (one for one in CUTEDSL.families() if one.family == family)
    wanted = re.compile(f"{part}.*_align{size}x{size}x{size if size > 1 else 4}$")
    return next(one for one in generated_by(found) if wanted.search(one.metadata.kernel_name))


@pytest.mark.parametrize("name", some(FAMILIES, 3))
def test_products_of_copies_are_exact_for_integers(name):
    """No byte beside a matrix is read, which is a fault in the emulator: it may be nobody's."""
    kernel = kernel_of(name)
    assert all(kernel.repacked)
    for turn, (*sizes, batch) in enumerate(SIZES):
        args = awkward_arguments(kernel, *sizes, batch, values="integers", seed=turn)
        EmulatedKernel.compile(kernel, args).run(args, multiprocessors=4, seed=turn)
        wide = torch.float64 if args.A.tensor.dtype.is_floating_point else torch.int64
        product = args.A.tensor.to(wide) @ args.B.tensor.to(wide)
        assert torch.equal(args.out.tensor, product.to(args.out.tensor.dtype))
