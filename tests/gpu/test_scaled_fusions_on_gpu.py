"""Every fusion of the catalogue of operands with scales, in the kernels of this GPU."""

import pytest
import torch
from support.fusion_cases import CATALOGUE, check_twice, on_gpu
from support.scaled_fusions import MODES, ScaledCase

import kernel_api as ka
from kernel_api.verification import factor_of, judge, prepare

pytestmark = [pytest.mark.gpu, pytest.mark.compile, pytest.mark.timeout(600)]

E5M2 = torch.float8_e5m2
INT8 = {"of_A": torch.int8, "of_B": torch.int8}
SETTINGS = [
    {"M": 13, "N": 192, "K": 144, "pad": 0},
    {"M": 70, "N": 192, "K": 784, "batch": 2, "pad": 1},
    {"M": 129, "N": 192, "K": 400, "layout": "n", "pad": 3, "of_A": E5M2},
    {"M": 1000, "N": 1344, "K": 1040, "pad": 16},
    {"M": 1, "N": 192, "K": 2064, "pad": 16, "of_B": E5M2},
    {"M": 70, "N": 192, "K": 784, "pad": 16, **INT8},
    {"M": 300, "N": 1344, "K": 144, "batch": 2, "pad": 1, **INT8},
]
KERNELS = 3  # of a family, for a case in a setting

#: What no kernel computes, and words of the reason.
WHOLE_ROWS = ("quantize, row", "norm")
HOPPER = (9, 0)


def cases():
    turns = [(name, scales) for name in CATALOGUE for scales in MODES]
    for turn, (name, scales) in enumerate(turns):
        for place in (turn, turn + 3):
            how = SETTINGS[place % len(SETTINGS)]
            if scales == "blocks" and "of_A" in how and how["of_A"] is torch.int8:
                continue
            case = ScaledCase(name, CATALOGUE[name], how={**how, "scales": scales})
            yield pytest.param(case, turn, id=f"{name}-{scales}-{place % len(SETTINGS)}")


def refused(case, args):
    """Words of the reason, if no kernel takes such a case."""
    integers = args.A.dtype.is_integer
    if case.name.startswith("quantize") and (args.out.dtype.is_float == integers):
        return f"out is {args.out.dtype}"
    if case.name in WHOLE_ROWS and args.N > 256:
        return "whole rows"
    if case.name == "halves" and case.how["scales"] == "blocks":
        return "side by side"
    if not integers and torch.cuda.get_device_capability() != HOPPER:
        return "sm_90a"
    return None


@pytest.mark.parametrize(("case", "turn"), list(cases()))
def test_a_fusion_of_scaled_operands_is_what_the_reference_computes(case, turn):
    args = on_gpu(case.drawn(turn))
    families = {}
    for kernel in ka.get_kernels(args, providers=["cutedsl"]):
        families.setdefault(kernel.family_name(), []).append(kernel)
    reason = refused(case, args)
    if reason is not None:
        assert not families
        assert reason in str(ka.explain(args, providers=["cutedsl"]))
        return
    assert families, str(ka.explain(args))
    for kernels in families.values():
        for kernel in kernels[turn % len(kernels) :: max(1, len(kernels) // KERNELS)][:KERNELS]:
            check_twice(kernel, args)


@pytest.mark.parametrize("out", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("beside", ["rows", "columns", "gaps"])
@pytest.mark.parametrize(
    "sizes", [(4, 16, 400), (132, 272, 512), (1020, 2112, 7168), (64, 48, 944)]
)
def test_torch_is_right_where_it_scales_blocks(sizes, beside, out):
    """With scales that lie in any way, and others the second time."""
    M, N, K = sizes
    draw = torch.Generator("cuda").manual_seed(K)

    def stored(rows, element=torch.float8_e4m3fn):
        return torch.randn(rows, K, generator=draw, device="cuda").to(element)

    def scale(rows, columns):
        whole = torch.rand(2 * rows, 2 * columns, generator=draw, device="cuda") + 0.25
        one = whole[::2, ::2]
        return {"rows": one.contiguous(), "columns": one.t().contiguous().t()}.get(beside, one)

    n, k = -(-N // 128), -(-K // 128)
    A = ka.ScaledOperand(stored(M), scale(M, k), ka.ScaleMode.BLOCK_1x128)
    B = ka.ScaledOperand(stored(N, E5M2).t(), scale(k, n), ka.ScaleMode.BLOCK_128x128)
    args = ka.GemmArguments(A, B, torch.empty(M, N, dtype=out, device="cuda"))
    offered = ka.get_kernels(args, providers=["torch"])
    assert bool(offered) == (torch.cuda.get_device_capability() == HOPPER), str(ka.explain(args))
    for kernel in offered:
        assert ka.verify(kernel, args)
        launch = kernel.prepare(args)
        A.scale.tensor.mul_(1.7)
        prepare(args)
        launch(*args.tensors)
        assert judge(args, factor_of(kernel))
