"""Every design of the norm families is right on a GPU, on odd sizes, by the rule of ``verify``.

Of a design, one of its element types and alignments in turns; ``KERNEL_API_TEST_EVERY_KERNEL=1``
takes all: compilation is most of the time, so add ``-n 8``.
"""

import os

import pytest
import torch
from support.norms import (
    KINDS,
    LAYER,
    LAYER_BACKWARD,
    RMS,
    RMS_BACKWARD,
    Draw,
    arguments_for,
    block_maxima,
    columns_for,
    gradients,
    hadamard,
    norm,
    rows_beside,
    weight_type,
)

import kernel_api as ka
from kernel_api import provider
from kernel_api._description import described, rebuilt
from kernel_api.verification import poison

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

EVERY_KERNEL = os.environ.get("KERNEL_API_TEST_EVERY_KERNEL") == "1"
BACKWARD = (RMS_BACKWARD, LAYER_BACKWARD)
EPS = 0.03

(CUTEDSL,) = provider.providers(["cutedsl"])


def registered():
    found = []
    for family in CUTEDSL.families():
        if family.arguments not in KINDS:
            continue
        kernels = family.generate_kernels(lambda metadata: True)
        for design in dict.fromkeys(kernel.metadata.design for kernel in kernels):
            of_design = [k for k in kernels if k.metadata.design == design]
            place = len(found)
            chosen = of_design if EVERY_KERNEL else [of_design[7 * place % len(of_design)]]
            found += [pytest.param(k, place, id=k.metadata.kernel_name) for k in chosen]
    return found


every_kernel = pytest.mark.parametrize(("kernel", "place"), registered())


def options(kernel, place, M, N, seed):
    """Operands beside the matrices: others in each case."""
    draw = Draw(M, N, kernel.metadata.operands.x.dtype, device="cuda", seed=seed)
    turn = place + seed
    element = weight_type(kernel, ("float32", None, "float16")[turn % 3])
    given = {"weight": draw.columns(element=element)}
    if turn % 5 == 0:
        given["weight"] = None
    if kernel.arguments in BACKWARD:
        given["dweight"] = draw.columns(read=False, element=("float32", None)[turn % 2])
        if turn % 3:
            given["dbias"] = draw.columns(read=False)
        if turn % 2:
            given["dresidual"] = rows_beside(kernel, draw, ("bfloat16", "float32")[turn % 4 // 2])
        return given
    given |= {"eps": EPS, "rstd": draw.statistic()}
    if turn % 2:
        given["bias"] = draw.columns()
    if kernel.arguments is LAYER:
        given["mean"] = draw.statistic()
    if turn % 3 == 1:
        element = ("bfloat16", "float32", "float16")[turn // 3 % 3]
        given["residual"] = rows_beside(kernel, draw, element)
        if turn % 2 and given["residual"] is not None:
            given["residual_out"] = rows_beside(kernel, draw, element, read=False)
    if kernel.family == "sm80.rmsnorm_rht_amax":
        rows = (1, 2, 8, 5, M + 3)[turn % 5]
        signs = draw.statistic((16,)).copy_(draw.random((16,)).sign())
        given |= {"hadamard": turn % 4 > 0, "rows_per_block": rows}
        if given["hadamard"]:
            given["signs"] = signs
        given["amax"] = draw.statistic((-(-M // rows),))
        given["global_amax"] = draw.statistic(())
    return given


def made(kernel, place, M, N, seed=0):
    N = columns_for(kernel, N)
    given = options(kernel, place, M, N, seed)
    for without in changes(kernel, M, N, seed, given):
        args = arguments_for(kernel, M, N, device="cuda", seed=seed, **{**given, **without})
        if kernel.supports(args):
            break
    return args


def changes(kernel, M, N, seed, given):
    """Of what is given, until a kernel takes it: registers may hold one of the sums, shared memory
    as many stages beside a residual of another type or none."""
    yield {}
    if kernel.arguments in BACKWARD:
        draw = Draw(M, N, kernel.metadata.operands.x.dtype, device="cuda", seed=seed)
        for element in ("bfloat16", "float32", None):
            more = None if element is None else rows_beside(kernel, draw, element)
            for dbias in (given.get("dbias"), None):
                yield {"dresidual": more, "dbias": dbias}
    else:
        asked = arguments_for(kernel, M, N, device="cuda", seed=seed, **given)
        words = "the rows in flight fit in shared memory, with those of a residual"
        assert str(kernel.supports(asked)).startswith(words)
        yield {"residual": None, "residual_out": None}


@every_kernel
def test_a_kernel_is_right_and_repeats_itself(kernel, place):
    for seed, (M, N) in enumerate(((1, 1), (133, 900), (1000 + place, 20), (4097, 100))):
        args = made(kernel, place, M, N, seed)
        what = f"{args}: {kernel.supports(args)}"
        assert kernel.supports(args), what
        assert kernel in ka.get_kernels(args, providers=["cutedsl"]), what
        found = ka.verify(kernel, args)
        assert found, f"{what}: {found}"
        first = {name: output.tensor.clone() for name, output in args.outputs.items()}
        for output in args.outputs.values():
            poison(output.tensor)
        kernel.run(args)
        for name, output in args.outputs.items():
            assert torch.equal(output.tensor, first[name]), f"{what}: {name} differs when repeated"


@every_kernel
def test_no_rows_leave_zeros_in_sums_over_them(kernel, place):
    args = made(kernel, place, 0, 100)
    for output in args.outputs.values():
        poison(output.tensor)
    kernel.run(args)
    for name in {"dweight", "dbias", "global_amax"} & set(args.outputs):
        assert not args.outputs[name].tensor.any()


# Against formulas ------------------------------------------------------------------------


def close(found, exact, unit):
    """Off by so many units of the largest."""
    off = (found.double().cpu() - exact.cpu()).abs().max()
    assert off <= unit * exact.abs().max() + 1e-30, f"off by {off}"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(("M", "N"), [(8192, 8192), (4096, 5120), (37, 12288), (2000, 128)])
def test_the_best_kernel_agrees_with_the_formula(kind, M, N):
    draw = Draw(M, N, "bfloat16", device="cuda")
    given = {"weight": draw.columns()}
    if kind in BACKWARD:
        given["dweight"] = draw.columns(read=False, element="float32")
    args = draw.arguments(kind, **given)
    kernel = ka.get_kernels(args)[0]
    assert kernel.metadata.provider == "cutedsl"
    kernel.run(args)
    x, weight, centred = args.x.tensor, args.weight.tensor, kind in (LAYER, LAYER_BACKWARD)
    if kind in BACKWARD:
        exact = gradients(args.dy.tensor, x, weight, centred=centred, eps=1e-5)
        close(args.dx.tensor, exact["dx"], 2.0**-8)
        close(args.dweight.tensor, exact["dweight"], 1e-5)
    else:
        close(args.out.tensor, norm(x, weight, centred=centred, eps=args.eps), 2.0**-8)


@pytest.mark.parametrize("M", [4096, 37])
def test_a_residual_is_added_in_both_directions(M):
    """Its sum stored where it is, as servers do; and the gradient of that sum."""
    draw = Draw(M, 5120, "bfloat16", device="cuda")
    shared = draw.matrix()
    before = shared.clone()
    args = draw.arguments(RMS, weight=draw.columns(), residual=shared, residual_out=shared)
    kernel = ka.get_kernels(args)[0]
    assert kernel.metadata.provider == "cutedsl"
    kernel.run(args)
    assert torch.equal(shared, before + args.x.tensor)
    exact = norm(shared, args.weight.tensor, centred=False, eps=args.eps)
    close(args.out.tensor, exact, 2.0**-8)
    given = {"dweight": draw.columns(read=False, element="float32"), "dresidual": draw.matrix()}
    args = draw.arguments(RMS_BACKWARD, weight=draw.columns(), **given)
    kernel = ka.get_kernels(args)[0]
    assert kernel.metadata.provider == "cutedsl"
    kernel.run(args)
    operands = args.dy.tensor, args.x.tensor, args.weight.tensor
    exact = gradients(*operands, centred=False, eps=1e-5)
    close(args.dx.tensor, exact["dx"] + args.dresidual.tensor.double(), 2.0**-8)
    close(args.dweight.tensor, exact["dweight"], 1e-5)


def test_a_large_transform_agrees_with_the_formula_in_every_block():
    M, N = 8192, 8192
    draw = Draw(M, N, "bfloat16", device="cuda")
    signs = draw.statistic((16,)).copy_(draw.random((16,)).sign())
    maxima = {"amax": draw.statistic((1024,)), "global_amax": draw.statistic(())}
    args = draw.arguments(RMS, weight=draw.columns(), hadamard=True, signs=signs, **maxima)
    ka.get_kernels(args)[0].run(args)
    y = norm(args.x.tensor, args.weight.tensor, centred=False, eps=1e-6).cpu()
    h = hadamard(y, signs.cpu())
    close(args.out.tensor, h, 2.0**-8)
    found = args.amax.tensor.double().cpu()
    assert ((found - block_maxima(h, 8)).abs() <= 2e-6 * found).all()
    close(args.global_amax.tensor, h.abs().max(), 2e-6)


def test_more_blocks_of_rows_than_a_workspace_has_places_for():
    M, N, rows = 8100 * 20, 16, 20
    draw = Draw(M, N, "bfloat16", device="cuda")
    maxima = {"amax": draw.statistic((M // rows,)), "global_amax": draw.statistic(())}
    args = draw.arguments(RMS, rows_per_block=rows, **maxima)
    for kernel in ka.get_kernels(args, providers=["cutedsl"])[:6]:
        assert ka.verify(kernel, args)


# Ways to run -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_prepared_launch_is_captured_and_replayed(kind):
    draw = Draw(300, 1024, "bfloat16", device="cuda")
    sums = {"dweight": draw.columns(read=False)} if kind in BACKWARD else {}
    args = draw.arguments(kind, weight=draw.columns(), **sums)
    kernel = ka.get_kernels(args)[0]
    launch = kernel.prepare(args)
    further = {name: operand.tensor for name, operand in args.further.items()}
    graph = torch.cuda.CUDAGraph()
    launch(*args.tensors, **further)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        launch(*args.tensors, **further)
    expected = {name: output.tensor.clone() for name, output in args.outputs.items()}
    for output in args.outputs.values():
        poison(output.tensor)
    graph.replay()
    torch.cuda.synchronize()
    for name, output in args.outputs.items():
        assert torch.equal(output.tensor, expected[name])


def test_streams_and_a_workspace_of_the_caller():
    draw = Draw(500, 2048, "bfloat16", device="cuda")
    args = draw.arguments(LAYER_BACKWARD, dweight=draw.columns(read=False))
    kernel = ka.get_kernels(args)[0]
    workspace = torch.empty(kernel.get_workspace_size(args), dtype=torch.uint8, device="cuda")
    workspace.fill_(0xFF)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    kernel.run(args, stream=stream, workspace=workspace)
    stream.synchronize()
    first = args.dweight.tensor.clone()
    kernel.run(args)
    torch.cuda.synchronize()
    assert torch.equal(args.dweight.tensor, first)


def test_functions_with_gradients_use_these_kernels_and_agree_with_torch():
    x = torch.randn(4, 100, 1024, device="cuda", dtype=torch.bfloat16)
    for ours, theirs in (
        (ka.nn.rmsnorm, torch.nn.functional.rms_norm),
        (ka.nn.layernorm, torch.nn.functional.layer_norm),
    ):
        results = []
        for compute in (
            lambda x, w, ours=ours: ours(x, w, eps=1e-5),
            lambda x, w, theirs=theirs: theirs(x.float(), (1024,), w.float(), eps=1e-5),
        ):
            leaf = x.clone().requires_grad_()
            weight = torch.linspace(0.5, 2, 1024, device="cuda").bfloat16().requires_grad_()
            y = compute(leaf, weight)
            (y.float() * x.float().cos()).sum().backward()
            results.append([y.detach().double(), leaf.grad.double(), weight.grad.double()])
        for found, exact in zip(*results, strict=True):
            close(found, exact, 0.02)


def test_what_is_offered_for_a_meta_tensor_is_offered_here():
    draw = Draw(512, 4096, "bfloat16", device="cuda")
    args = draw.arguments(RMS)
    assert set(ka.get_kernels(args, providers=["cutedsl"])) == set(
        ka.get_kernels(rebuilt(described(args)), providers=["cutedsl"])
    )
