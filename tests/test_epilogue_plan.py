"""What of epilogues the GEMM families take, and with which words they refuse the rest."""

import dataclasses
import re

import pytest
import torch
from support.sampling import some

import kernel_api as ka
from kernel_api import epilogue as ep

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
AMPERE, HOPPER = "sm80.gemm", "sm90.gemm"
BOTH = (AMPERE, HOPPER)


def empty(*shape, dtype=BF16):
    return torch.empty(shape, dtype=dtype, device="meta")


def arguments(fn, M=128, N=256, K=64, *, columns=1, out=BF16, **operands):
    """columns: of out, in units of N."""
    D = empty(M, int(columns * N), dtype=out)
    epilogue = ka.EpilogueArguments(fn, **operands)
    return ka.GemmArguments(empty(M, K), empty(N, K).t(), D, epilogue=epilogue)


def refusals(args):
    explanation = ka.explain(args, cc=90, providers=["cutedsl"])
    return {one.family: one for one in explanation.rejected}


def offered(args, family):
    kernels = ka.get_kernels(args, cc=90, providers=["cutedsl"])
    return [kernel for kernel in kernels if kernel.family_name() == family]


# Refused by every family -----------------------------------------------------------------

COMPUTED = "the epilogue is one that kernels compute as they write their tiles"


def pairs_of(granularity):
    def fn(accum):
        gate, up = ep.glu_pair(accum, granularity=granularity)
        return gate * up

    return fn


def other_threads(accum):
    return ep.glu_pair(accum, granularity=32)[0] + ep.glu_pair(accum, granularity=1)[0]


REFUSED = {
    "pairs": (pairs_of(2), {"columns": 0.5}, "pairs of 2 columns; 1 and multiples of 8 are with"),
    "threads": (other_threads, {"columns": 0.5}, "add meets columns that lie with other threads"),
    "truth": (
        lambda accum: (accum, accum > 0),
        {"positive": empty(128, 256, dtype=torch.bool)},
        "positive is bool; numbers are written",
    ),
    "rotation": (
        lambda accum, cos, sin: ep.rotate(accum, cos, sin, 16, 4, 8),
        {"cos": empty(128, 4), "sin": empty(128, 4)},
        "a rotation of 8 columns from 4; a pair is with one thread if they are multiples of 8",
    ),
    "maximum": (
        lambda accum: accum / ep.amax(accum, None),
        {},
        "div of a amax, known when all tiles are",
    ),
    "columns": (
        lambda accum: accum - ep.sum(accum, -2),
        {},
        "sub of a sum, known when all tiles are",
    ),
    "blocks": (
        lambda accum: accum / ep.repeat(ep.amax(accum, -1, 4), 4),
        {},
        "blocks of 4 columns; multiples of 8 are with one quad",
    ),
    "blocks of blocks": (
        lambda accum: (accum, ep.max(ep.amax(accum, -1, 8), None)),
        {"largest": empty(dtype=F32)},
        "a max of one value per block of columns",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_kernel_computes_is_refused_with_the_reason(name):
    fn, how, reason = REFUSED[name]
    told = refusals(arguments(fn, **how))
    for family in BOTH:
        assert told[family].rule == COMPUTED
        assert reason in told[family].reason


def swiglu(accum):
    gate, up = ep.glu_pair(accum, granularity="halves")
    return ep.silu(gate) * up


def identity(accum):
    return accum * 2.0


def row_sum(accum):
    return accum, ep.sum(accum, -1)


def by_rule(args, rule, reason, families=BOTH):
    told = refusals(args)
    for family in families:
        assert told[family].rule == rule
        assert reason in told[family].reason
    return told


def test_halves_are_dealt_out_in_blocks_of_32():
    args = arguments(swiglu, N=96, columns=0.5)
    by_rule(args, "halves of columns are dealt out to tiles 32 at a time", "96 columns")


def test_hopper_kernels_take_halves_of_a_k_major_matrix_only():
    def args(B):
        A, out = empty(128, 64), empty(128, 128)
        return ka.GemmArguments(A, B, out, epilogue=ka.EpilogueArguments(swiglu))

    rule = "B is K-major where its halves are taken in turns: a swizzle is wider than 32 columns"
    by_rule(args(empty(64, 256)), rule, "", [HOPPER])
    assert HOPPER not in refusals(args(empty(256, 64).t()))


@pytest.mark.parametrize(("empty_mode", "sizes"), [("M", (0, 8, 8)), ("K", (8, 8, 0))])
def test_a_product_of_nothing_has_no_epilogue(empty_mode, sizes):
    rule = "an epilogue takes at least one row, column and product"
    by_rule(arguments(identity, *sizes), rule, f"{empty_mode} is 0", [AMPERE])


def test_an_output_of_64_bits_is_refused():
    args = arguments(lambda accum: (accum, accum * 2.0), more=empty(128, 256, dtype=F64))
    told = refusals(args)
    for family in BOTH:
        assert told[family].rule.startswith("an epilogue writes matrices of float32, float16,")
        assert "more is float64" in told[family].reason
    args = arguments(row_sum, total=empty(128, dtype=F64))
    for family in BOTH:
        assert "total is float64" in refusals(args)[family].reason


def test_matrices_of_small_integers_are_for_ampere_kernels():
    args = arguments(lambda accum: (accum, accum * 2.0), more=empty(128, 256, dtype=torch.int8))
    assert "more is int8" in refusals(args)[HOPPER].reason
    assert offered(args, AMPERE)


def test_rows_beyond_a_tile_are_refused_with_what_to_do_instead():
    def normalised(accum):
        return accum * ep.rsqrt(ep.mean_square(accum, -1))

    rules = {
        AMPERE: "what is computed from whole rows needs a warp that holds them",
        HOPPER: "what is computed from whole rows needs a tile that holds them",
    }
    for family, rule in rules.items():
        told = by_rule(arguments(normalised, N=512), rule, "N is 512, and", [family])
        assert "or let a second kernel do what needs the row" in told[family].nearest
        assert offered(arguments(normalised, N=128), family)


def test_more_counters_than_a_workspace_has_are_refused():
    args = arguments(row_sum, M=64 << 15, total=empty(64 << 15, dtype=F32))
    assert "the epilogue's reductions take 32768 counters of 16384" in refusals(args)[HOPPER].reason


def test_more_parts_of_reductions_than_are_counted_in_32_bits_are_refused():
    args = arguments(row_sum, M=1 << 19, N=1 << 21, total=empty(1 << 19, dtype=F32))
    for family in BOTH:
        told = r"the epilogue's reductions leave \d+ parts of 2147483647"
        assert re.match(told, refusals(args)[family].reason)


# Designs that fit ------------------------------------------------------------------------


def test_a_view_of_many_columns_chooses_designs_whose_warps_have_them():
    def turned(accum, cos, sin):
        return ep.rotate(accum, cos, sin, 128)

    args = arguments(turned, cos=empty(128, 64), sin=empty(128, 64))
    kernels = offered(args, AMPERE)
    assert kernels
    assert {kernel.metadata.design.warp_columns for kernel in kernels} == {128}
    wide = arguments(lambda accum, cos, sin: ep.rotate(accum, cos, sin, 256), **WIDE)
    rule = "a warp has whole bundles of the columns that the epilogue looks at together"
    by_rule(wide, rule, "they are 256, and there are", [AMPERE])


WIDE = {"cos": empty(128, 128), "sin": empty(128, 128)}


def test_an_operand_that_is_not_aligned_is_for_kernels_that_ask_for_no_alignment():
    def biased(accum, C):
        return accum + C

    aligned, padded = empty(128, 256), empty(128, 257)[:, :256]
    for family in BOTH:
        divisible = [
            k.metadata.operands.out.divisibility
            for k in offered(arguments(biased, C=aligned), family)
        ]
        assert max(divisible) > 1
        kernels = offered(arguments(biased, C=padded), family)
        assert kernels
        assert all(kernel.metadata.operands.out.divisibility == 1 for kernel in kernels)


def test_8_bits_are_written_with_an_epilogue_and_not_without():
    out = empty(128, 256, dtype=torch.float8_e4m3fn)
    A, B = empty(128, 64), empty(256, 64).t()
    plain = ka.GemmArguments(A, B, out)
    quantised = ka.fusions.gemm_quantize(A, B, out=out, scale=0.5)
    rule = "8 bits are written in units of a scale, or as an epilogue says"
    for family in BOTH:
        assert offered(quantised, family)
        assert not offered(plain, family)
        assert refusals(plain)[family].rule == rule
        assert "out is float8_e4m3fn, and there is neither" in refusals(plain)[family].reason
        assert refusals(plain)[family].nearest == "would match with the epilogue of gemm_quantize"
    whole = [empty(*shape, dtype=torch.int8) for shape in ((128, 64), (256, 64), (128, 256))]
    args = ka.GemmArguments(whole[0], whole[1].t(), whole[2])
    assert refusals(args)["sm90.gemm_int8"].nearest is None


def test_what_is_written_beside_8_bits_may_be_too_wide_for_narrow_subtiles():
    def stored(accum):
        return accum * 2.0, accum

    wide = empty(128, 256, dtype=F32)
    args = arguments(stored, out=torch.float8_e4m3fn, wide=wide)
    columns = {kernel.metadata.design.kernel_tile[1] for kernel in offered(args, HOPPER)}
    assert columns and not any(n % 32 for n in columns)
    rule = "what is written beside out has at least 8 columns in as many bytes as out at once"
    args = arguments(stored_pairs(1), columns=0.5, out=torch.float8_e4m3fn, stored=wide)
    by_rule(args, rule, "stored has 4", [HOPPER])


def test_a_whole_number_is_the_same_factor_as_a_fraction():
    def scaled(accum, alpha):
        return accum * alpha

    whole, fraction = arguments(scaled, alpha=2), arguments(scaled, alpha=0.5)
    assert whole.signature == fraction.signature
    for family in BOTH:
        kernel = offered(whole, family)[0]
        assert kernel in offered(fraction, family)
        for args in (whole, fraction):
            assert [type(value) for value in kernel.more_values(args).values()] == [float]


def test_a_seed_stays_a_whole_number():
    def thinned(accum, p, seed, offset):
        return ep.dropout(accum, p, seed, offset)

    args = arguments(thinned, p=1, seed=2**40 + 17, offset=5)
    (kernel, *_) = offered(args, AMPERE)
    values = kernel.more_values(args)
    assert {name: type(value) for name, value in values.items()} == {
        "p": float, "seed": int, "offset": int,
    }  # fmt: skip
    last = arguments(thinned, p=1, seed=2**64 - 1, offset=2**63)
    assert kernel.more_values(last) == {"p": 1.0, "seed": -1, "offset": -(2**63)}


def test_a_hopper_tile_that_spans_rows_is_written_in_whole_subtiles():
    def fn(accum):
        return accum, ep.sqrt(ep.sum(accum * accum, -1))

    args = arguments(fn, M=64, N=40, norm=empty(64, dtype=F32))
    columns = {kernel.metadata.design.kernel_tile[1] for kernel in offered(args, HOPPER)}
    assert columns and all(n % min(32, n) == 0 for n in columns)


# Pairs of columns where accumulators take most registers ---------------------------------


def gated(accum):
    gate, up = ep.glu_pair(accum, granularity=32)
    return up * ep.silu(gate)


def gated_sum(accum, bias):
    return gated(accum + bias)


def geglu(accum, alpha):
    gate, up = ep.glu_pair(accum * alpha, granularity=32)
    return up * ep.gelu(gate)


def normed(accum):
    return accum * ep.rsqrt(ep.sum(accum * accum, -1))


def grouped(**options):
    return ka.fusions.grouped_gemm_glu(
        *(empty(512, 64), empty(4, 384, 64).mT, empty(4, dtype=torch.int32)),
        out=empty(512, 192),
        prob=empty(512, dtype=F32),
        **options,
    )


LIGHT = {
    "pairs": lambda: arguments(gated, N=384, columns=0.5),
    "of a sum": lambda: arguments(gated_sum, N=384, columns=0.5, bias=empty(384, dtype=F32)),
    "geglu": lambda: arguments(geglu, N=384, columns=0.5, alpha=0.7),
    "geglu, float32": lambda: arguments(geglu, N=384, columns=0.5, alpha=0.7, out=F32),
    "norm of rows": lambda: arguments(normed, N=192),
    "Hadamard": lambda: arguments(lambda accum: ep.hadamard(accum), N=384),
    "groups": grouped,
    "groups, picked": lambda: grouped(row_index=empty(512, dtype=torch.int32)),
}


def of_192_registers(args):
    kernels = ka.get_kernels(args, cc=90, providers=["cutedsl"])
    return [one for one in kernels if getattr(one.metadata.design, "accumulators", 0) == 192]


@pytest.mark.parametrize("name", LIGHT)
def test_few_operations_on_pairs_are_for_192_accumulators_too(name):
    assert of_192_registers(LIGHT[name]())


@pytest.mark.compile
@pytest.mark.parametrize("name", some(LIGHT, 2))
def test_few_operations_on_pairs_fit_beside_192_accumulators(name):
    args = LIGHT[name]()
    for kernel in some(of_192_registers(args), 1):
        assert kernel.compile(args, cc="90a").resources.spill_bytes == 0, kernel


def with_two_erfs(accum):
    gate, up = ep.glu_pair(accum, granularity=32)
    return ep.gelu(up) * ep.gelu(gate)


def with_matrix(accum, R):
    return ep.glu_pair(accum, granularity=32)[1] * R


def with_two_outputs(accum):
    gate, up = ep.glu_pair(accum, granularity=32)
    return up * 2.0, gate


HEAVY = {
    "erf, twice": (with_two_erfs, {}),
    "matrix": (with_matrix, {"R": empty(128, 192)}),
    "two outputs": (with_two_outputs, {"gate": empty(128, 192)}),
}


@pytest.mark.parametrize("name", HEAVY)
def test_more_than_few_operations_on_pairs_are_not(name):
    fn, operands = HEAVY[name]
    args = arguments(fn, N=384, columns=0.5, **operands)
    assert offered(args, HOPPER) and not of_192_registers(args)
    design = of_192_registers(arguments(lambda accum: accum * 2.0, N=384))[0].metadata.design
    kernel = offered(args, HOPPER)[0]
    status = type(kernel)(dataclasses.replace(kernel.metadata, design=design)).supports(args)
    assert not status
    assert str(status.error).startswith("accumulators of up to 160 registers leave room")
    assert str(status.error).endswith("they take 192")


# Pairs of columns where the product is transposed ----------------------------------------


def tiles(args, family=HOPPER):
    """Of the transposed product, whose rows are columns of the product."""
    designs = [kernel.metadata.design for kernel in offered(args, family)]
    return {design.kernel_tile for design in designs if design.swap_ab}


def transposed(args, rows_and_columns):
    """What a kernel of such a design says to these arguments."""
    plain = ka.GemmArguments(args.A, args.B, empty(args.M, args.N))
    designs = (kernel.metadata.design for kernel in offered(plain, HOPPER))
    design = next(one for one in designs if one.swap_ab and one.kernel_tile[:2] == rows_and_columns)
    kernel = offered(args, HOPPER)[0]
    return type(kernel)(dataclasses.replace(kernel.metadata, design=design)).supports(args)


def stored_pairs(granularity):
    def fn(accum):
        return pairs_of(granularity)(accum), accum

    return fn


@pytest.mark.parametrize("granularity", [8, 32, 64, "halves"])
def test_pairs_are_taken_as_rows_of_narrow_transposed_tiles(granularity):
    found = tiles(arguments(pairs_of(granularity), M=8, columns=0.5))
    assert {(64, 16), (128, 16), (128, 64)} <= {(rows, columns) for rows, columns, _ in found}
    assert max(columns for _, columns, _ in found) == 64


def test_pairs_of_wide_transposed_tiles_are_refused():
    args = arguments(pairs_of(32), M=512, columns=0.5)
    status = transposed(args, (128, 256))
    rule = "a tile of the transposed product has at most 64 columns where its rows are pairs"
    assert not status
    assert str(status.error) == f"{rule}; it has 256"


@pytest.mark.parametrize("granularity", [96, 160, 224])
def test_rows_of_a_transposed_tile_are_whole_blocks_of_pairs(granularity):
    args = arguments(pairs_of(granularity), M=8, N=2 * granularity * 3, columns=0.5)
    found = tiles(args)
    assert found and {rows for rows, _, _ in found} == {64}
    status = transposed(args, (128, 16))
    rule = "rows of a transposed tile are whole blocks of pairs, or blocks whole tiles"
    assert str(status.error) == f"{rule}; it has 128, blocks have {2 * granularity}"


BUNDLES = "a tile holds whole bundles of the columns that the epilogue looks at together"


@pytest.mark.parametrize(
    ("fn", "operands"),
    [
        (pairs_of(1), {}),
        (pairs_of(16), {}),
        (stored_pairs(8), {"stored": empty(8, 256)}),
        (lambda accum: (pairs_of(32)(accum), ep.sum(accum, -2)), {"stored": empty(256, dtype=F32)}),
        (lambda accum: (pairs_of(32)(accum), ep.max(accum, -1)), {"stored": empty(8, dtype=F32)}),
    ],
    ids=["neighbours", "of 16", "of 8, stored", "beside columns", "beside rows"],
)
def test_what_is_no_pair_of_rows_of_a_thread_is_not_for_transposed_tiles(fn, operands):
    args = arguments(fn, M=8, columns=0.5, **operands)
    assert not tiles(args)
    status = transposed(args, (128, 16))
    reason = "it looks at other columns, which are rows of the transposed product"
    assert str(status.error) == f"{BUNDLES}; {reason}"


def test_an_interleaved_product_is_not_for_transposed_tiles():
    assert not tiles(arguments(lambda a: ep.interleave(a, a * a), M=8, columns=2))
    assert tiles(arguments(lambda a: ep.interleave(*ep.glu_pair(a)), M=8))


def test_what_is_stored_or_reduced_beside_pairs_of_rows_is_taken():
    def fn(accum):
        result = pairs_of("halves")(accum)
        return result, accum, ep.amax(result, None)

    assert tiles(arguments(fn, M=8, columns=0.5, x=empty(8, 256), amax=empty(dtype=F32)))


@pytest.mark.parametrize(("granularity", "taken"), [(8, True), (32, False)])
def test_pairs_are_dealt_out_to_transposed_tiles_of_a_k_major_matrix(granularity, taken):
    epilogue = ka.EpilogueArguments(pairs_of(granularity))
    args = ka.GemmArguments(empty(8, 64), empty(64, 256), empty(8, 128), epilogue=epilogue)
    assert bool(tiles(args)) == taken
    status = transposed(args, (128, 16))
    assert bool(status) == taken
    rule = "B is K-major where transposed tiles take pairs: a swizzle has 8 of their rows"
    assert taken or str(status.error) == rule


@pytest.mark.parametrize("granularity", [32, "halves"])
def test_few_rows_of_pairs_prefer_the_transposed_product(granularity):
    def first(M):
        args = arguments(pairs_of(granularity), M, 28672, 4096, columns=0.5)
        (best, *_) = ka.get_kernels(args, cc=90, providers=["cutedsl"])
        return best.metadata.design

    assert all(first(M).swap_ab for M in (1, 7, 16))
    assert not any(first(M).swap_ab for M in (512, 4096))


@pytest.mark.parametrize("family", BOTH)
def test_a_reduction_is_written_without_the_modes_it_lost(family):
    def fn(accum):
        return accum, ep.sum(accum, -1)

    assert offered(arguments(fn, total=empty(128, dtype=F32)), family)
    refusal = refusals(arguments(fn, total=empty(128, 1, dtype=F32)))[family]
    assert "total has shape (128, 1)" in refusal.reason
    assert "total.view(...)" in refusal.nearest


@pytest.mark.parametrize("family", BOTH)
def test_unsigned_integers_are_not_taken_for_signed_ones(family):
    def fn(accum, other):
        return accum + other

    assert offered(arguments(fn, other=empty(128, 256, dtype=torch.int8)), family)
    refusal = refusals(arguments(fn, other=empty(128, 256, dtype=torch.uint8)))[family]
    assert "other is uint8" in refusal.reason


@pytest.mark.parametrize("family", BOTH)
def test_the_state_of_dropout_is_of_signed_integers_or_of_64_bits(family):
    def problem(**state):
        given = {"seed": 1, "offset": 2, **state}
        return arguments(lambda a, seed, offset: ep.dropout(a, 0.5, seed, offset), **given)

    for element in (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint64):
        assert offered(problem(seed=empty(dtype=element)), family)
    for name in ("seed", "offset"):
        for element in (torch.uint8, torch.uint16, torch.uint32):
            told = refusals(problem(**{name: empty(dtype=element)}))[family]
            assert f"{name} is {element}".replace("torch.", "") in told.reason
            assert told.nearest == f"would match with {name} of a signed type"
