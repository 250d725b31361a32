"""What the element-wise family offers: queries, rules, metadata, compiled code."""

import re

import pytest
import torch
from support.benchmarks import script
from support.elementwise import arguments_for, arguments_on, of_fusion, offered
from support.fusion_cases import CATALOGUE, a_glu
from support.kernels import EVERY_KERNEL, generated_by, sample_of
from support.sampling import some
from support.sass import sass

import kernel_api as ka
from kernel_api import epilogue as ep
from kernel_api import provider
from kernel_api.metadata import KernelMetadata

FAMILY = "sm80.elementwise"
BENCHMARK = script("elementwise")
BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
E4M3 = torch.float8_e4m3fn

(CUTEDSL,) = provider.providers(["cutedsl"])
(SM80,) = (family for family in CUTEDSL.families() if family.family == FAMILY)
DESIGNS = list(SM80.space.designs(SM80.design))


def meta(*shape, element=BF16):
    return torch.empty(shape, dtype=element, device="meta")


def plain(M=512, N=1024, element=BF16, written=None):
    return ka.ElementwiseArguments(
        meta(M, N, element=element), meta(M, N, element=written or element)
    )


def fused(fn, M=512, N=1024, element=BF16, out=None, **operands):
    epilogue = ka.EpilogueArguments(fn, **operands)
    written = meta(M, N, element=element) if out is None else out
    return ka.ElementwiseArguments(meta(M, N, element=element), written, epilogue=epilogue)


def refusal(args):
    (told,) = [r for r in ka.explain(args, cc=90).rejected if r.family == FAMILY]
    return told


def swiglu(accum):
    up, gate = ep.glu_pair(accum, granularity="halves")
    return ep.silu(gate) * up


# The query -------------------------------------------------------------------------------


@pytest.mark.parametrize("cc", [80, 86, 89, 90, 100, 120])
def test_every_gpu_from_ampere_on_is_served(cc):
    assert offered(plain(), cc)


def test_an_older_gpu_is_not():
    assert offered(plain(), 75) == []


@pytest.mark.parametrize("strides", [(1024, 1), (1025, 1), (1, 512), (0, 1), (1, 0), (0, 0)])
@pytest.mark.parametrize("element", [BF16, F32, E4M3, torch.int32, torch.int64, torch.bool])
def test_any_strides_and_real_types_are_served(element, strides):
    x = meta(1 << 20, element=element).as_strided((512, 1024), strides)
    for out in (meta(512, 1024), meta(1024, 512).t(), meta(512, 2048)[:, ::2]):
        assert offered(ka.ElementwiseArguments(x, out))


def test_whole_vectors_are_best_and_then_wide_rows():
    for args in (plain(8192, 4096), plain(8192, 4096, F32), plain(8192, 4096, F32, BF16)):
        kernels = offered(args)
        seconds = [kernel.predict(args) for kernel in kernels]
        assert seconds == sorted(seconds)
        best = kernels[0].metadata
        assert best.operands.x.alignment == best.operands.out.alignment == 16
        assert best.design.columns == 256
        size = 8192 * 4096 * (args.x.dtype.itemsize + args.out.dtype.itemsize)
        assert size / 4.8e12 < seconds[0] < 1.3 * size / 4.8e12  # what an H200 moves at most


def test_few_columns_are_for_narrow_tiles_and_sums_over_rows_for_tall_ones():
    assert offered(plain(1 << 18, 64))[0].metadata.design.columns == 64
    sums = fused(lambda accum: (accum, ep.sum(accum, -2)), 8192, 4096, sums=meta(4096, element=F32))
    assert offered(sums)[0].metadata.design.steps > 1


def test_sums_over_columns_go_along_whole_rows_where_there_are_many():
    def sums(M, N):
        return fused(lambda accum: (accum, ep.sum(accum, -1)), M, N, sums=meta(M, element=F32))

    best = offered(sums(8192, 4096))[0]
    assert best.metadata.design.whole_rows and best.metadata.design.label().endswith("_whole_rows")
    assert best.get_workspace_size(sums(8192, 4096)) == 0
    assert offered(sums(1 << 25, 64)), "no counter for each block of rows is needed"
    for M, N in ((64, 8192), (2048, 2048), (8192, 256)):
        assert offered(sums(M, N))[0].metadata.design.columns == min(N, 2048) // (1 + (N == 2048))
    kernels = offered(sums(1, 1 << 20))
    assert not kernels[0].metadata.design.whole_rows
    assert any(kernel.metadata.design.whole_rows for kernel in kernels)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (plain(), "it has none"),
        (fused(lambda accum: (accum, ep.amax(accum, None)), amax=meta(element=F32)), "it has none"),
        (
            fused(
                lambda accum: (accum, ep.sum(accum, -1), ep.max(accum, -2)),
                rows=meta(512, element=F32),
                columns=meta(1024, element=F32),
            ),
            "it has one over rows",
        ),
    ],
)
def test_ctas_go_along_whole_rows_for_reductions_over_columns_alone(args, words):
    assert not any(kernel.metadata.design.whole_rows for kernel in offered(args))
    graph = args.epilogue.graph if args.epilogue is not None else None
    assert not any(
        kernel.metadata.design.whole_rows for kernel in SM80.generate_kernels(bool, args.epilogue)
    )
    operands = offered(args)[0].metadata.operands
    (design, *_) = [design for design in SM80.space.designs(SM80.design) if design.whole_rows]
    status = SM80(SM80.describe(operands, design, graph)).supports(args)
    assert not status and str(status).endswith(f"over rows; {words}"), status


def test_sums_that_are_all_that_is_written_cost_what_is_read():
    sums = ka.EpilogueArguments(
        lambda accum: (accum, ep.sum(accum, -1)), sums=meta(8192, element=F32)
    )
    args = ka.ElementwiseArguments(meta(8192, 4096), epilogue=sums)
    stored = ka.ElementwiseArguments(meta(8192, 4096), meta(8192, 4096), epilogue=sums)
    best, other = offered(args)[0], offered(stored)[0]
    assert best.metadata.operands.x.alignment == 16
    assert best.predict(args) < 0.65 * other.predict(stored)


def test_a_broadcast_x_costs_what_is_in_memory():
    x = meta(1, 4096).expand(8192, 4096)
    args = ka.ElementwiseArguments(x, meta(8192, 4096))
    whole = plain(8192, 4096)
    kernel = offered(args)[0]
    assert kernel.predict(args) < 0.7 * kernel.predict(whole)


# Rules -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (plain(element=F64), "x is float64; expected"),
        (plain(element=torch.int16, written=torch.bool), "out is bool; expected"),
        (plain(element=BF16, written=F64), "out is float64; expected"),
        (fused(lambda accum: accum * 2, 0), "at least one row, column and batch; M is 0"),
        (
            fused(swiglu, 512, 96, out=meta(512, 48)),
            "halves of columns are dealt out to tiles 32 at a time; 96 columns",
        ),
        (
            fused(lambda accum: accum > 0, out=meta(512, 1024, element=torch.bool)),
            "out is bool; expected",
        ),
        (
            fused(lambda accum: accum - ep.amax(accum, None)),
            "known when all tiles are",
        ),
        (
            fused(lambda accum: accum * ep.rsqrt(ep.mean_square(accum, -1))),
            "needs a tile that holds them; N is 1024, and 128 columns are together",
        ),
        (
            fused(lambda accum: (accum, accum), copy=meta(512, 1024, element=F64)),
            "and else signed numbers of 8 to 32 bits; copy is float64",
        ),
        (
            fused(lambda a: (a, ep.amax(a, -1)), largest=meta(512, element=torch.uint8)),
            "and else signed numbers of 8 to 32 bits; largest is uint8",
        ),
        (
            fused(lambda a: (a, ep.sum(a, -2)), 64, 1 << 23, sums=meta(1 << 23, element=F32)),
            r"the epilogue's reductions take \d+ counters of 16384",
        ),
    ],
)
def test_what_is_refused_is_told(args, words):
    told = refusal(args)
    assert re.search(words, told.reason), told.reason
    assert offered(args) == []


@pytest.mark.parametrize(
    ("shape", "axis", "most"),
    [
        ((16, 1, 3 << 22), -1, 16 * 3 << 22),  # a part for each element
        (((1 << 19) + 64, 1 << 15), -2, 2**31 - 1),  # counted in 32 bits
    ],
)
def test_reductions_that_leave_more_parts_than_there_is_sense_in_are_refused(shape, axis, most):
    kept = meta(*shape[: axis % len(shape)], *shape[axis % len(shape) + 1 :], element=F32)
    sums = ka.EpilogueArguments(
        lambda a: (a, ep.sum(a, axis), ep.max(a, axis)), sums=kept, largest=kept
    )
    args = ka.ElementwiseArguments(meta(*shape, element=torch.int8), epilogue=sums)
    room = 65536 + 4 * most
    assert max(kernel.get_workspace_size(args) for kernel in offered(args)) <= room
    statuses = [
        str(kernel.supports(args))
        for kernel in SM80.generate_kernels(bool, args.epilogue)
        if kernel.get_workspace_size(args) > room
    ]
    told = f"the epilogue's reductions leave \\d+ parts of {most}"
    assert any(re.fullmatch(told, status) for status in statuses), statuses
    assert "supported" not in statuses


def test_operands_that_are_not_aligned_are_read_in_smaller_vectors():
    def alignments(b):
        args = fused(lambda accum, b: accum + b, b=b)
        return {kernel.metadata.operands.out.alignment for kernel in offered(args)}

    assert alignments(meta(512, 1024)) == {16, 4, 2}
    assert alignments(meta(512, 1026)[:, :1024]) == {4, 2}
    assert alignments(meta(512, 1025)[:, :1024]) == {2}
    assert alignments(meta(1024, 512).t()) == {16, 4, 2}  # read one by one
    assert {k.metadata.operands.x.alignment for k in offered(plain(512, 1020))} == {4, 2}


def test_the_query_is_the_enumeration_that_supports_the_arguments():
    for args in (plain(300, 48), plain(77, 1040, F32), fused(swiglu, out=meta(512, 512))):
        everything = SM80.generate_kernels(lambda metadata: True, args.epilogue)
        assert set(offered(args)) == {kernel for kernel in everything if kernel.supports(args)}
        assert offered(args)


def test_arguments_of_another_operation_are_refused_as_such():
    A = meta(16, 16)
    told = refusal(ka.GemmArguments(A, A.clone(), A.clone()))
    assert told.reason == "the kernel computes ElementwiseArguments, these are GemmArguments"


# Metadata --------------------------------------------------------------------------------


def test_names_are_unique_and_metadata_comes_back_from_json():
    kernels = generated_by(SM80)
    assert len({kernel.metadata.kernel_name for kernel in kernels}) == len(kernels)
    for kernel in (*kernels[::17], *offered(fused(swiglu, out=meta(512, 512)))[:2]):
        again = KernelMetadata.from_json(kernel.metadata.to_json())
        assert again == kernel.metadata
        assert again.rebuild() == kernel


def test_the_implementation_is_what_the_metadata_says():
    sums = fused(lambda accum: (accum, ep.sum(accum, -1)), sums=meta(512, element=F32))
    kernels = [*sample_of(generated_by(SM80)), *offered(sums)]
    assert {kernel.metadata.design for kernel in kernels} == {*DESIGNS}
    for kernel in kernels:
        built, design = kernel.implementation(), kernel.metadata.design
        assert (built.threads, built.columns) == (design.threads, design.columns)
        assert (built.turns, built.steps) == (design.turns, design.steps)
        assert built.whole_rows == design.whole_rows
        assert built.tile == kernel.tiling(1, 1).tile == (design.rows(32), design.columns_at_once)
        widest = max(t.dtype.itemsize for t in kernel.metadata.operands.tensors.values())
        assert 2 * built.merged * widest <= max(16, 2 * widest)


@pytest.mark.parametrize("name", CATALOGUE)
def test_tiles_are_those_that_workspaces_are_made_for(name):
    args = arguments_on(of_fusion(CATALOGUE[name], M=64, N=128, pad=0))
    for kernel in offered(args):
        built = kernel.implementation_for(args)
        assert built.tile == kernel.tiling(64, 128).tile
        by_parts = [
            one
            for one in built.epilogue.reduced
            if not (built.whole_rows and one.over == "columns")
        ]
        assert (kernel.get_workspace_size(args) > 0) == bool(by_parts)


# Compiled --------------------------------------------------------------------------------

#: What is compiled for each design, in turns: types, and an epilogue.
COMPILED = [
    lambda: plain(64, 256),
    lambda: plain(64, 256, F32, BF16),
    lambda: plain(64, 256, BF16, E4M3),
    lambda: arguments_on(of_fusion(a_glu("swiglu", granularity="halves"), M=64, N=256, pad=8)),
    lambda: arguments_on(of_fusion(CATALOGUE["dgelu"], M=64, N=256, pad=8)),
    lambda: arguments_on(of_fusion(CATALOGUE["rope"], M=64, N=256, pad=8, element=F32)),
    lambda: arguments_on(of_fusion(CATALOGUE["norm"], M=64, N=64, pad=8)),
    lambda: fused(lambda a: (a, ep.sum(a * a, -1)), 64, 512, sums=meta(64, element=F32)),
    lambda: fused(lambda a: (a, ep.max(a, -1)), 64, 512, F32, most=meta(64, element=F32)),
]


TARGETS = ("sm_80", "sm_90a", "sm_100a")
#: Each design for each target, or some for one of them.
BUILT = [
    (design, cc)
    for i, design in enumerate(some(DESIGNS, 3))
    for cc in (TARGETS if EVERY_KERNEL else (TARGETS[i % len(TARGETS)],))
]


@pytest.mark.compile
@pytest.mark.parametrize(
    ("design", "cc"), BUILT, ids=[f"{design.label()}-{cc}" for design, cc in BUILT]
)
def test_every_design_compiles_without_spills(design, cc):
    compiled = 0
    for make in COMPILED[cc == "sm_90a" :: 2]:
        args = make()
        kernels = offered(args, cc, metadata_filter=lambda metadata: metadata.design == design)
        for kernel in kernels[:: max(1, len(kernels) - 1)]:  # whole vectors, and elements
            used = kernel.compile(args, cc=cc).resources
            compiled += 1
            assert used.spill_bytes == 0, kernel
            assert used.threads == kernel.implementation_for(args).threads == design.threads
            assert used.registers * used.threads <= 64 * 1024
            assert used.shared_memory_bytes <= 48 * 1024
    assert compiled >= 2


@pytest.mark.compile
def test_a_sample_of_types_and_alignments_compiles():
    variants = list({k.metadata.operands: k for k in generated_by(SM80)}.values())
    for kernel in some(variants[:: 1 if len(variants) < 8 else 5], 7):
        args = arguments_for(kernel, 7, 33, 2, device="meta")
        assert kernel in ka.get_kernels(args, cc=80, providers=["cutedsl"])
        assert kernel.compile(args, cc=80).resources.spill_bytes == 0


def moves(args, cc=90):
    """Loads from and stores to global memory of the best kernel."""
    code = sass(offered(args, cc)[0].compile(arguments_on(args), cc=cc))
    return (re.findall(rf"\b{name}\.E(\.\d+)?", code) for name in ("LDG", "STG"))


@pytest.mark.compile
@pytest.mark.parametrize("element", some([BF16, F32, F16], 2))
def test_everything_is_moved_16_bytes_at_once(element):
    full = meta(512, 1024, element=element)
    for args in (
        plain(element=element),
        fused(lambda accum, full: accum + full, element=element, full=full),
        fused(swiglu, element=element, out=meta(512, 512, element=element)),
    ):
        loads, stores = moves(args)
        assert set(loads) == set(stores) == {".128"}
        assert len(loads) >= 4  # on their way at a time


@pytest.mark.compile
def test_an_artifact_serves_every_size_of_its_signature_and_no_other(cache_directory):
    args = fused(lambda accum, bias: ep.gelu(accum + bias), bias=meta(1024))
    kernel = offered(args)[0]
    artifact = kernel.compile(args, cc=90)
    wider = fused(args.epilogue.fn, 100, 4096, bias=meta(4096))
    assert kernel.compile(wider, cc=90) is artifact
    other = fused(args.epilogue.fn, 100, 4096, bias=meta(4096, element=F32))
    assert kernel.compile(other, cc=90) is not artifact
    assert list(cache_directory.rglob("*.json"))


@pytest.mark.compile
def test_a_compiled_epilogue_is_exported_and_read_back(tmp_path):
    args = fused(lambda accum: (accum, ep.sum(accum, -2)), sums=meta(1024, element=F32))
    kernel = offered(args)[0]
    found = ka.load(kernel.compile(args, cc=90).export(tmp_path / "sums.so"))
    assert found.kernel == kernel
    assert found.signature == args.signature


# The benchmark ---------------------------------------------------------------------------


def test_a_dry_run_lists_every_problem_with_the_best_kernels(capsys):
    assert BENCHMARK.main(["--dry-run", "--candidates", "2"]) == 0
    text = capsys.readouterr().out
    for problem in BENCHMARK.PROBLEMS:
        assert f"{problem.label}  peers: torch, torch.compile" in text
    assert text.count("us expected") == 2 * len(BENCHMARK.PROBLEMS)


@pytest.mark.parametrize("operation", BENCHMARK.EPILOGUES)
def test_peers_compute_the_same_chain(operation):
    problem = BENCHMARK.Problem(operation, 16, 64)
    args = problem.arguments("cpu")
    found = BENCHMARK.peers_of(problem, args)["torch"]()
    (kernel,) = ka.get_kernels(args, providers=["reference"])
    exact = kernel.exact(args)
    found = found if isinstance(found, tuple) else (found,)
    for values, expected in zip(found, exact.values(), strict=True):
        torch.testing.assert_close(values.double(), expected, rtol=0.02, atol=0.02)
    moved = sum(o.tensor.numel() * o.tensor.element_size() for o in args.named_operands.values())
    assert 0.8 * moved < problem.bytes <= moved
