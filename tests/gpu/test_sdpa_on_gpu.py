"""Attention on this GPU: every family on a random grid of sizes, strides, masks and options, by the
rule of ``verify``; the same bits when repeated; and what surrounds kernels: streams, graphs.

All kernels are compiled together before the first test; where processes share the tests (``-n``),
every test compiles its own. Of what computes gradients on Hopper, two designs take turns where
there are masks or options; ``KERNEL_API_TEST_EVERY_KERNEL=1`` takes all.
"""

import math
import os

import pytest
import torch
from support.sdpa import NAN, backward_of, run, uniform
from support.sdpa_grid import BF16, F8, KINDS, Case, Draw, cases, causal, documents

import kernel_api as ka
from kernel_api import masks
from kernel_api.arguments import Dropout
from kernel_api.providers.reference.sdpa import ReferenceSdpa
from kernel_api.verification import Expected, conduct, factor_of, poison

pytestmark = [pytest.mark.gpu, pytest.mark.compile, pytest.mark.timeout(900)]

EVERY_KERNEL = os.environ.get("KERNEL_API_TEST_EVERY_KERNEL") == "1"
RERUNS = 200


def by_family(args):
    """The kernels that are offered, of every family in CuTe DSL."""
    found = {}
    for kernel in ka.get_kernels(args, providers=["cutedsl"]):
        found.setdefault(kernel.family_name(), []).append(kernel)
    return found


def chosen(args, turn, every=True):
    """Of families for Hopper all kernels, or two in turns; of others the first."""
    for family, kernels in by_family(args).items():
        if not family.startswith("sm90"):
            yield kernels[0]
        elif every or EVERY_KERNEL:
            yield from kernels
        else:
            kernels = sorted(kernels, key=lambda kernel: kernel.metadata.kernel_name)
            yield kernels[turn % len(kernels)]
            if len(kernels) > 1:
                yield kernels[(turn + len(kernels) // 2) % len(kernels)]


def of_case(case, args):
    return chosen(args, case.seed, every=case.kind == "plain" or not case.gradient)


def made(sizes, device):
    """A draw, and what makes forward arguments of it. sizes: B, H, H_kv, S_q, S_kv, D."""
    draw = Draw(*sizes, sizes[-1], device=device, seed=0, pads=(0, 8), element=BF16)
    return draw, draw.arguments


def gradient_of(args, **more):
    """Backward arguments on what the reference computes."""
    if args.device.type != "meta":
        run(args)
    dO = torch.randn_like(args.out.tensor, memory_format=torch.contiguous_format)
    return backward_of(args, dO, **more)


GRID = list(cases())


@pytest.fixture(scope="module", autouse=True)
def _compiled(request):
    """All kernels that the chosen tests need, by several processes."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    wanted = {}
    names = set()
    for item in request.session.items:
        names.add(getattr(item, "originalname", None))
        case = item.callspec.params.get("case") if hasattr(item, "callspec") else None
        if isinstance(case, Case):
            args = case.arguments("meta")
            for kernel in of_case(case, args):
                wanted.setdefault((kernel, args.signature), args)
    for name in names & BESIDE.keys():
        for args in BESIDE[name]("meta"):
            for kernel in chosen(args, 0, every=False):
                wanted.setdefault((kernel, args.signature), args)
    if wanted:
        ka.compile_all([kernel for kernel, _ in wanted], list(wanted.values()))


# The grid --------------------------------------------------------------------------------


@pytest.mark.parametrize("case", GRID, ids=str)
def test_attention_is_what_the_reference_computes(case):
    args = case.arguments("cuda")
    kernels = list(of_case(case, args))
    on_hopper = torch.cuda.get_device_capability() == (9, 0)
    of_8_bits = KINDS[case.kind].element == F8
    assert kernels or (of_8_bits and not on_hopper), str(ka.explain(args))
    expected = Expected(args)
    wrong = {}
    for kernel in kernels:
        name = kernel.metadata.kernel_name
        broken = conduct(args, lambda kernel=kernel: kernel.run(args))
        verdict = expected.judge(args, factor_of(kernel))
        if broken or not verdict:
            wrong[name] = broken or str(verdict)
        if case.kind == "far below zero" and not case.gradient:
            lse = args.lse.tensor
            assert bool(((lse < -88.7) & lse.isfinite()).all()), name
    assert not wrong, f"{args}: {wrong}"


def test_what_is_offered_for_a_meta_tensor_is_offered_here():
    for case in GRID[::7]:
        here, there = (
            set(ka.get_kernels(case.arguments(device), providers=["cutedsl"]))
            for device in ("cuda", "meta")
        )
        assert here == there, case


# What must not be read -------------------------------------------------------------------


def packed(lengths, lengths_kv, device="cuda"):
    """Forward arguments of sequences one behind the other."""
    draw, _ = made((1, 4, 2, sum(lengths), sum(lengths_kv), 128), device)
    ends = [draw.integers([0, *torch.tensor(one).cumsum(0).tolist()])
            for one in (lengths, lengths_kv)]  # fmt: skip
    q, k, v = (one[0].transpose(0, 1) for one in (draw.queries(), draw.keys(), draw.values()))
    out = draw.results(read=False)[0].transpose(0, 1)
    more = {"max_seqlen_q": max(lengths), "max_seqlen_kv": max(lengths_kv)}
    return ka.SdpaArguments(
        q, k, v, out, draw.lse()[0], cu_seqlens_q=ends[0], cu_seqlens_kv=ends[1],
        mask=masks.Causal("bottom_right"), **more,
    )  # fmt: skip


def test_what_a_sequence_has_does_not_reach_its_neighbours():
    lengths, lengths_kv = (70, 130, 0, 65), (100, 200, 40, 65)
    args = packed(lengths, lengths_kv)
    backward = gradient_of(args)
    start, end = lengths[0], lengths[0] + lengths[1]
    start_kv, end_kv = lengths_kv[0], lengths_kv[0] + lengths_kv[1]
    others = torch.ones(sum(lengths), dtype=torch.bool, device="cuda")
    others[start:end] = False
    others_kv = torch.ones(sum(lengths_kv), dtype=torch.bool, device="cuda")
    others_kv[start_kv:end_kv] = False
    saved = {name: getattr(backward, name).tensor.clone() for name in ("Q", "K", "V", "dO")}
    for one in (args, backward):
        for kernel in chosen(one, 0, every=False):
            found = []
            for poisoned in (False, True):
                for name, tensor in saved.items():
                    getattr(backward, name).tensor.copy_(tensor)
                if poisoned:
                    for name in ("Q", "dO"):
                        getattr(backward, name).tensor[start:end] = NAN
                    for name in ("K", "V"):
                        getattr(backward, name).tensor[start_kv:end_kv] = NAN
                kernel.run(one)
                rows = {n: others_kv if n in ("dK", "dV") else others for n in one.outputs}
                found.append({
                    n: (o.tensor.mT if n == "lse" else o.tensor)[rows[n]].clone()
                    for n, o in one.outputs.items()
                })  # fmt: skip
            for name, (clean, dirty) in {n: [f[n] for f in found] for n in found[0]}.items():
                what = f"{kernel.metadata.kernel_name}: {name}"
                assert not dirty.isnan().any(), what
                if name != "dQ":
                    assert torch.equal(clean, dirty), what
    for name, tensor in saved.items():
        getattr(backward, name).tensor.copy_(tensor)


def packed_8_bits(lengths, lengths_kv, D, device="cuda", **options):
    """The same of 8 bits. Of sequences without queries no key and no value is a number."""
    sizes = (1, 6, 2, sum(lengths), sum(lengths_kv), D, D)
    draw = Draw(*sizes, device=device, seed=D, pads=(0, 16), element=F8)
    tensors = {"Q": draw.queries(), "K": draw.keys(), "V": draw.values()}
    tensors["out"] = draw.results(read=False).bfloat16()
    given = {name: one[0].transpose(0, 1) for name, one in tensors.items()}
    for side, lens in (("q", lengths), ("kv", lengths_kv)):
        ends = [0, *torch.tensor(lens).cumsum(0).tolist()]
        given |= {f"cu_seqlens_{side}": draw.integers(ends), f"max_seqlen_{side}": max(lens)}
    for b, queries in enumerate(lengths):
        if not queries:
            first = sum(lengths_kv[:b])
            for name in "KV":
                given[name][first : first + lengths_kv[b]] = NAN
    for name in ("descale_k", "descale_v"):
        given[name] = draw.wides(len(lengths), draw.H_kv).abs()
    return ka.SdpaArguments(**given, lse=draw.lse()[0], **options)


PACKED_MASKS = {
    "everything": None,
    "causal": masks.Causal("bottom_right"),
    "window": masks.SlidingWindow(200, 30, "bottom_right"),
}


@pytest.mark.parametrize("mask", PACKED_MASKS)
@pytest.mark.parametrize("D", [64, 128, 256])
def test_packed_sequences_of_8_bits_are_what_the_reference_computes(D, mask):
    lengths, lengths_kv = (799, 0, 64, 1, 130, 0, 300), (1023, 500, 0, 65, 1, 3, 449)
    args = packed_8_bits(lengths, lengths_kv, D, mask=PACKED_MASKS[mask])
    expected = Expected(args)
    kernels = list(chosen(args, 0))
    on_hopper = torch.cuda.get_device_capability() == (9, 0)
    assert bool(kernels) == on_hopper, str(ka.explain(args))
    for kernel in kernels:
        broken = conduct(args, lambda kernel=kernel: kernel.run(args))
        assert broken is None, f"{kernel.metadata.kernel_name}: {broken}"
        verdict = expected.judge(args, factor_of(kernel))
        assert verdict, f"{kernel.metadata.kernel_name}: {verdict}"
        assert not differing(kernel, args), kernel.metadata.kernel_name


def paged(size, D, device="cuda", element=BF16, **options):
    """Sequences in pages. Behind a last key nothing is a number, nor in other pages."""
    lengths = (700, 1, 2 * size, 0)
    B, each = len(lengths), -(-max(lengths) // size)
    how = {"device": device, "seed": D, "pads": (0, 16), "element": element}
    draw = Draw(B, 6, 2, 190, each * size, D, D, **how)
    order = list(range(B * each + 1))
    draw.choice.shuffle(order)
    table = [order[b * each : (b + 1) * each] for b in range(B)]
    for name, dense in (("K", draw.keys()), ("V", draw.values())):
        pages = torch.full((B * each + 1, 2, size, D), NAN, device=device).to(draw.element)
        for b, keys in enumerate(lengths if device != "meta" else ()):
            for page, start in enumerate(range(0, keys, size)):
                rows = dense[b, :, start : min(start + size, keys)]
                pages[table[b][page], :, : rows.shape[1]] = rows
        options[name] = pages
    options["page_table"], options["seq_lens_kv"] = draw.integers(table), draw.integers(lengths)
    for name in ("descale_k", "descale_v") if element == F8 else ():
        options[name] = draw.wides(B, 2).abs()
    for name in ("lse", "score_max", "score_sum_exp") if element == F8 else ("lse",):
        options[name] = draw.lse()
    out = draw.results(read=False).bfloat16()
    return ka.SdpaArguments(draw.queries(), out=out, **options)


@pytest.mark.parametrize("mask", PACKED_MASKS)
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("size", [8, 16, 256])
@pytest.mark.parametrize("element", [BF16, F8])
def test_pages_are_what_the_reference_computes(element, size, D, mask):
    args = paged(size, D, element=element, mask=PACKED_MASKS[mask])
    expected = Expected(args)
    kernels = list(chosen(args, 0))
    family = "sm90.sdpa_forward_fp8" if element == F8 else "sm90.sdpa_forward"
    on_hopper = torch.cuda.get_device_capability() == (9, 0)
    offered = {kernel.family_name() for kernel in kernels}
    assert (family in offered) == on_hopper, str(ka.explain(args))
    for kernel in kernels:
        broken = conduct(args, lambda kernel=kernel: kernel.run(args))
        verdict = expected.judge(args, factor_of(kernel))
        assert not broken and verdict, f"{kernel.metadata.kernel_name}: {broken or verdict}"


def far_apart(device):
    """Forward arguments whose last keys lie more than 2³¹ elements behind the first."""
    S_q, S_kv, D, pitch = 64, 70_000, 64, 1 << 15
    how = {"dtype": torch.bfloat16, "device": device}
    q = torch.randn(1, 1, S_q, D, **how)
    k, v = (torch.empty(S_kv, pitch, **how)[None, None, :, :D] for _ in range(2))
    for one in (k, v):
        one.copy_(torch.randn(one.shape, device=device))
    lse = torch.empty(1, 1, S_q, device=device)
    return ka.SdpaArguments(q, k, v, torch.empty_like(q), lse)


def test_rows_beyond_two_to_the_31_elements_are_found():
    args = far_apart("cuda")
    expected = Expected(args)
    for kernel in chosen(args, 0):
        for output in args.outputs.values():
            poison(output.tensor)
        kernel.run(args)
        verdict = expected.judge(args, factor_of(kernel))
        assert verdict, f"{kernel.metadata.kernel_name}: {verdict}"


# Dropout ---------------------------------------------------------------------------------

N = 64


def dropped(device, p, seed, offset, on_device):
    """Arguments of both passes: with all scores 0 and V = 1, out is what was kept of 1 / N, and so
    is the transpose of dV with dO = 1."""
    B, H = 2, 3
    q = torch.zeros(B, H, N, N, device=device, dtype=torch.bfloat16)
    k, eye = torch.randn_like(q), torch.eye(N, device=device, dtype=torch.bfloat16)
    v, dO = (eye.expand(B, H, N, N).contiguous() for _ in range(2))
    state = (seed, offset)
    if on_device:
        state = tuple(torch.tensor(one, device=device) for one in state)
    lse = torch.full((B, H, N), math.log(N), device=device)
    args = ka.SdpaArguments(q, k, v, torch.empty_like(q), lse, dropout=Dropout(p, *state))
    return args, backward_of(args, dO)


@pytest.mark.parametrize(
    ("p", "seed", "offset"), [(0.25, 7, 0), (0.5, (1 << 40) + 3, (1 << 32) - 2)]
)
@pytest.mark.parametrize("on_device", [False, True], ids=["numbers", "tensors"])
def test_both_passes_drop_what_the_generator_says(p, seed, offset, on_device):
    args, backward = dropped("cuda", p, seed, offset, on_device)
    keep = ReferenceSdpa.exact(args)["out"] > 0.5 / N
    for b, h, i, j in ((0, 0, 0, 0), (1, 2, 63, 63), (1, 0, 3, 5), (0, 2, 50, 33), (1, 1, 9, 42)):
        stream = offset + b * args.H + h
        assert bool(keep[b, h, i, j]) == (uniform(i, j, stream, seed) >= p)
    share = keep.double().mean().item()
    assert abs(share - (1 - p)) < 5 * math.sqrt(p * (1 - p) / keep.numel())
    heads = keep.view(-1, N, N)
    for other in heads[1:]:
        differ = (heads[0] != other).double().mean().item()
        assert abs(differ - 2 * p * (1 - p)) < 0.05
    passes = ((args, "out", False), (backward, "dV", True))
    for one, name, transposed in passes:
        kernels = list(chosen(one, 0, every=False))
        assert kernels, str(ka.explain(one))
        for kernel in kernels:
            written = one.outputs[name].tensor
            poison(written)
            kernel.run(one)
            found = written.mT if transposed else written
            assert torch.equal(found > 0.5 / N, keep), kernel.metadata.kernel_name


# Repeated --------------------------------------------------------------------------------


def bits(tensor):
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


def differing(kernel, args):
    """Names of outputs that any of many runs computes otherwise, with how much, of the largest."""
    launch = kernel.prepare(args)
    launch(*args.tensors)
    outputs = {name: one.tensor for name, one in args.outputs.items()}
    first = {name: one.clone() for name, one in outputs.items()}
    counts = {name: torch.zeros((), dtype=torch.long, device="cuda") for name in outputs}
    farthest = {name: torch.zeros((), device="cuda") for name in outputs}
    for _ in range(RERUNS):
        launch(*args.tensors)
        for name, one in outputs.items():
            counts[name] += (bits(one) != bits(first[name])).any()
            off = (one.float() - first[name].float()).nan_to_num().abs().max()
            farthest[name] = torch.maximum(farthest[name], off)
    found = {}
    for name, count in counts.items():
        if int(count):
            largest = first[name].float().nan_to_num().abs().max()
            found[name] = float(farthest[name] / largest)
    return found


#: B, H, H_kv, S_q, S_kv, D
REPEATED = {
    "prefill": (2, 8, 2, 799, 799, 128),
    "64": (1, 4, 4, 1023, 1023, 64),
    "decode": (3, 16, 2, 1, 5000, 128),
}


@pytest.mark.parametrize("name", REPEATED)
def test_many_runs_of_a_kernel_give_the_same_bits(name):
    draw, arguments = made(REPEATED[name], "cuda")
    given = {} if name == "decode" else causal(draw)
    args = arguments(**given)
    wrong = {}
    for kernel in chosen(args, 0):
        found = differing(kernel, args)
        if found:
            wrong[kernel.metadata.kernel_name] = found
    assert not wrong


@pytest.mark.parametrize("shape", [None, (32, 1, 1, 512), (32, 1, 512, 512), (1, 16, 512, 512)])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_many_runs_of_many_tiles_give_the_same_bits(shape, dim):
    """More than there is room for at once: shared memory is written again while others read."""
    _, arguments = made((32, 16, 16, 512, 512, dim), "cuda")
    bias = None if shape is None else torch.randn(shape, dtype=torch.bfloat16, device="cuda")
    args = arguments(bias=bias)
    kernels = by_family(args).get("sm90.sdpa_forward", [])
    found = {kernel.metadata.kernel_name: differing(kernel, args) for kernel in kernels}
    assert not any(found.values()), found


@pytest.mark.parametrize("kind", ["8 bits", "packed", "pages", "dropout", "padded"])
def test_many_runs_of_other_forms_give_the_same_bits(kind):
    case = next(one for one in GRID if one.kind == kind)
    args = case.arguments("cuda")
    found = {k.metadata.kernel_name: differing(k, args) for k in of_case(case, args)}
    assert not any(found.values()), found


@pytest.mark.parametrize("name", ["prefill", "64"])
def test_many_runs_of_a_gradient_differ_in_the_order_of_sums_alone(name):
    _, arguments = made(REPEATED[name], "cuda")
    args = gradient_of(arguments())
    eps = torch.finfo(torch.bfloat16).eps
    for kernel in chosen(args, 0):
        found = differing(kernel, args)
        what = f"{kernel.metadata.kernel_name}: {found}"
        assert set(found) <= ({"dQ"} if kernel.family_name().startswith("sm90") else set()), what
        assert found.get("dQ", 0.0) <= eps, what


def deterministic(device):
    """Backward arguments, plain and with gradients that are summed over many blocks."""
    draw, arguments = made((2, 6, 2, 799, 500, 128), device)
    sink, bias = draw.wides(draw.H), draw.random(1, draw.H, draw.S_q, draw.S_kv)
    given = {"sink": sink, "bias": bias, "mask": masks.Causal("bottom_right")}
    written = {"dSink": torch.empty_like(sink), "dBias": torch.empty_like(bias)}
    for more, wanted in (({}, {}), (given, written)):
        yield gradient_of(arguments(**more), deterministic=True, **wanted)
    # More blocks of keys than run at once, and tiles that are left out.
    for S, dim in ((1500, 64), (1500, 128), (700, 256)):
        draw, arguments = made((4, 8, 8, S, S, dim), device)
        for found in ({}, causal(draw), documents(draw)):
            yield gradient_of(arguments(**found), deterministic=True)


def test_deterministic_gradients_have_the_same_bits_every_time():
    for args in deterministic("cuda"):
        kernels = list(chosen(args, 0, every=False))
        assert kernels, str(ka.explain(args))
        for kernel in kernels:
            assert ka.verify(kernel, args)
            assert not differing(kernel, args), kernel.metadata.kernel_name


# Ways to run -----------------------------------------------------------------------------


def test_streams_and_a_workspace_of_the_caller():
    _, arguments = made((2, 4, 2, 300, 500, 64), "cuda")
    forward = arguments()
    for args in (forward, gradient_of(forward)):
        expected = Expected(args)
        for kernel in chosen(args, 0):
            size = kernel.get_workspace_size(args)
            workspace = torch.full((max(size, 1),), 0xFF, dtype=torch.uint8, device="cuda")
            stream = torch.cuda.Stream()
            for output in args.outputs.values():
                poison(output.tensor)
            torch.cuda.synchronize()
            kernel.run(args, stream=stream, workspace=workspace if size else None)
            stream.synchronize()
            verdict = expected.judge(args, factor_of(kernel))
            assert verdict, f"{kernel.metadata.kernel_name}: {verdict}"


def pages(device, element=torch.bfloat16, queries=1):
    B, H, H_kv, D, size, each = 3, 8, 2, 128, 64, 9
    shapes = ((B, H, queries, D), *((B * each, H_kv, size, D),) * 2)
    q, k, v = (torch.randn(shape, device=device).to(element) for shape in shapes)
    out = torch.empty(B, H, queries, D, dtype=torch.bfloat16, device=device)
    table = torch.arange(B * each, dtype=torch.int32, device=device).view(B, each)
    lens = torch.full((B,), size * each, dtype=torch.int32, device=device)
    lse = torch.empty(B, H, queries, device=device)
    more = {"page_table": table, "seq_lens_kv": lens}
    return ka.SdpaArguments(q, k, v, out, lse, **more)


PAGES = [(torch.bfloat16, 1), (torch.bfloat16, 200), (torch.float8_e4m3fn, 1)]


@pytest.mark.parametrize(("element", "queries"), PAGES, ids=str)
def test_a_graph_is_replayed_with_other_lengths_and_pages(element, queries):
    args = pages("cuda", element, queries)
    table, lens = (args.further[name].tensor for name in ("page_table", "seq_lens_kv"))
    launches = {kernel: kernel.prepare(args) for kernel in chosen(args, 0)}
    for kernel, launch in launches.items():
        launch(*args.tensors)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch(*args.tensors)
        for lengths in ((1, 300, 576), (64, 65, 2), (576, 576, 576)):
            lens.copy_(torch.tensor(lengths))
            table.copy_(torch.randperm(table.numel()).view(table.shape))
            poison(args.out.tensor)
            graph.replay()
            torch.cuda.synchronize()
            verdict = Expected(args).judge(args, factor_of(kernel))
            assert verdict, f"{kernel.metadata.kernel_name}, {lengths}: {verdict}"


#: Problems of tests beside the grid, whose kernels are compiled before, too.
BESIDE = {
    "test_what_a_sequence_has_does_not_reach_its_neighbours": lambda device: (
        args := packed((64, 1), (64, 1), device),
        gradient_of(args),
    ),
    "test_packed_sequences_of_8_bits_are_what_the_reference_computes": lambda device: (
        packed_8_bits((64, 1), (64, 1), D, device, mask=mask)
        for D in (64, 128, 256)
        for mask in PACKED_MASKS.values()
    ),
    "test_both_passes_drop_what_the_generator_says": lambda device: (
        *dropped(device, 0.5, 1, 1, False),
        *dropped(device, 0.5, 1, 1, True),
    ),
    "test_deterministic_gradients_have_the_same_bits_every_time": deterministic,
    "test_a_graph_is_replayed_with_other_lengths_and_pages": lambda device: (
        pages(device, element, queries) for element, queries in PAGES
    ),
    "test_pages_are_what_the_reference_computes": lambda device: (
        paged(size, D, device, element, mask=mask)
        for element in (BF16, F8)
        for size in (8, 16, 256)
        for D in (64, 128, 256)
        for mask in PACKED_MASKS.values()
    ),
    "test_gradients_are_those_of_torch": lambda device: (
        gradient_of(made((1, 1, 1, 64, 64, 64), device)[1](mask=mask), deterministic=True)
        for mask in (None, masks.Causal())
    ),
}
