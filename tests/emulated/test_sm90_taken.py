"""Dense products whose clusters take their tiles: whoever has which, each is computed once. The PTX
runs in the emulator, whose warps go on in an order drawn from a seed.

With KERNEL_API_EMULATE in the environment every case runs, else a sample.
"""

import pytest
import torch
from support import fusion_cases as make
from support.fusion_cases import Case, on_meta
from support.kernels import generated_by
from support.ptx.kernel import EmulatedKernel
from support.ptx.problems import awkward_arguments
from support.sampling import some

import kernel_api as ka
from kernel_api import provider
from kernel_api._workspaces import ZEROED
from kernel_api.providers.cutedsl.gemm.sm90 import PROMOTED_COLUMNS
from kernel_api.verification import judge

pytestmark = pytest.mark.compile

(CUTEDSL,) = provider.providers(["cutedsl"])


def of_designs():
    """One kernel of each design that takes tiles, by its name, with other majors and types in
    turn. Of 8 bits and 192 columns one with outputs of 16 bits, in vectors: beside others the
    producer spills 8 or 16 bytes, as that of its static twin does, and nothing emulated may."""
    found = {}
    for family in CUTEDSL.families():
        if family.family not in ("sm90.gemm", "sm90.gemm_fp8"):
            continue
        by_design = {}
        for kernel in generated_by(family):
            if kernel.metadata.design.takes_tiles:
                by_design.setdefault(kernel.metadata.design, []).append(kernel)
        for turn, (design, kernels) in enumerate(by_design.items()):
            if kernels[0].promoted and design.tile_shape[1] == PROMOTED_COLUMNS:
                outs = [(one, one.metadata.operands.out) for one in kernels]
                kernels = [k for k, out in outs if (out.dtype.bits, out.alignment) == (16, 16)]
            if kernels:
                kernel = kernels[7 * turn % len(kernels)]
                found[kernel.metadata.kernel_name] = kernel
    return found


KERNELS = of_designs()


@pytest.mark.parametrize("name", some(KERNELS, 3))
def test_every_tile_is_computed_once(name):
    """Of two matrices, with a cluster of tiles and a bit along each mode; K is up to more steps
    than are loaded while the counter answers."""
    kernel = KERNELS[name]
    (tile_m, tile_n, tile_k), (cluster_m, cluster_n, _) = (
        kernel.metadata.design.tile_shape,
        kernel.metadata.design.cluster_shape,
    )
    turn = list(KERNELS).index(name)
    M, N, K = tile_m * cluster_m + 5, tile_n * cluster_n + 9, (1 + 9 * (turn % 2)) * tile_k + 8
    args = awkward_arguments(kernel, M, N, K, 2, values="integers", seed=turn)
    emulated = EmulatedKernel.compile(kernel, args)
    assert not emulated.artifact.resources.spill_bytes
    emulated.run(args, multiprocessors=(1 + turn % 3) * cluster_m * cluster_n, seed=turn)
    verdict = judge(args)
    assert verdict, f"{M} x {N}: {verdict}"
    if not args.scaled:
        product = args.A.tensor.double() @ args.B.tensor.double()
        assert torch.equal(args.out.tensor, product.to(args.out.tensor.dtype))


FUSED = [
    Case("residual", make.a_residual, "cooperative", {"M": 300, "N": 520}),
    Case("swiglu", make.a_glu("swiglu", granularity="halves"), "pingpong", {"M": 300, "N": 384}),
    Case("rope", make.a_rope(head_dim=64), "pingpong", {"M": 300, "N": 384}),
    Case("gelu", make.a_bias_activation("gelu"), "pingpong", {"M": 300, "N": 384}),
]


def taking(args):
    kernels = ka.get_kernels(on_meta(args), cc=90, providers=["cutedsl"])
    return [k for k in kernels if getattr(k.metadata.design, "takes_tiles", False)]


@pytest.mark.parametrize("case", some(FUSED, 2), ids=lambda case: case.name)
def test_what_is_fused_is_right(case):
    args = case.drawn(3)
    kernel = next(k for k in taking(args) if k.metadata.design.schedule == case.design)
    emulated = EmulatedKernel.compile(kernel, args)
    assert not emulated.artifact.resources.spill_bytes
    emulated.run(args, multiprocessors=2, seed=1)
    verdict = judge(args)
    assert verdict, f"{kernel.metadata.kernel_name}: {verdict}"


def test_what_is_carried_or_drawn_or_written_twice_has_a_share_of_tiles():
    sizes = {"M": 300, "N": 384}
    most = {
        name: max((k.metadata.design.accumulators for k in taking(case.drawn(0))), default=0)
        for name, case in {
            "residual": Case("residual", make.a_residual, "", sizes),
            "two matrices": Case("swiglu", make.a_glu("swiglu"), "", sizes),
            "amax": Case("amax", make.an_amax, "", sizes),
            "dropout": Case("dropout", make.a_dropout, "", sizes),
        }.items()
    }
    assert most == {"residual": 192, "two matrices": 128, "amax": 0, "dropout": 0}


def is_first(M, N, K):
    """Whether what takes tiles is the first choice; alone it is as fast as its static twin."""
    new = [torch.empty(*shape, dtype=torch.bfloat16, device="meta") for shape in ((M, K), (N, K))]
    args = ka.GemmArguments(
        new[0], new[1].mT, torch.empty(M, N, dtype=torch.bfloat16, device="meta")
    )
    names = [k.metadata.kernel_name for k in ka.get_kernels(args, cc=90, providers=["cutedsl"])]
    assert {name.replace("_dynamic", "") for name in names} <= {*names}
    return "_dynamic" in names[0]


def test_tiles_are_taken_where_clusters_have_several_of_many_steps():
    assert is_first(4096, 4096, 4096)
    assert is_first(2048, 2048, 2048)
    assert not is_first(4096, 4096, 512)
    assert not is_first(1024, 1024, 8192)
    assert not is_first(16, 8192, 8192)


def test_the_counter_is_in_the_workspace():
    tensors = torch.empty(512, 64), torch.empty(64, 512), torch.empty(512, 512)
    args = ka.GemmArguments(*(one.to("meta", torch.bfloat16) for one in tensors))
    offered = ka.get_kernels(args, lambda m: getattr(m.design, "takes_tiles", False), cc=90)
    assert {kernel.get_workspace_size(args) for kernel in offered} == {ZEROED}
    assert {kernel.workspace_for(*args.tensors) for kernel in offered} == {ZEROED}
