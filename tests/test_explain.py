"""Why, and why not: ka.explain."""

import json

import pytest
import torch
from support.data import gemm_arguments
from support.kernels import CpuGemm, CudaGemm, LoopGemm

import kernel_api as ka
from kernel_api.errors import ArgumentError
from kernel_api.metadata import DesignMetadata
from kernel_api.space import Operands, Space, rule

BF16 = ("bf16", "bf16", "f32")


def families(rows):
    return [row.family for row in rows]


def rejection(family, args, **options):
    (found,) = [r for r in ka.explain(args, **options).rejected if r.family == family]
    return found


# Accepted and rejected -------------------------------------------------------------------


def test_every_family_is_either_accepted_or_rejected(registry):
    registry.register(CudaGemm, LoopGemm, CpuGemm)
    for args in (
        gemm_arguments(4, 4, 4),
        gemm_arguments(4, 4, 4, types=BF16, device="meta"),
        gemm_arguments(4, 4, 4, types=("int16",) * 3),
    ):
        told = ka.explain(args)
        named = families(told.accepted) + families(told.rejected)
        assert len(named) == len(set(named))
        assert {"CudaGemm", "LoopGemm", "CpuGemm", "torch.mm", "reference.gemm"} <= set(named)


def test_the_accepted_kernels_are_those_of_the_query(registry):
    registry.register(CudaGemm, LoopGemm)
    for device in ("cpu", "meta"):
        args = gemm_arguments(64, 64, 64, types=BF16, device=device)
        told = ka.explain(args)
        assert {k for a in told.accepted for k in a.kernels} == set(ka.get_kernels(args))


def test_cpu_tensors_are_accepted_by_torch_and_reference():
    told = ka.explain(gemm_arguments(4, 4, 4))
    assert families(told.accepted) == ["torch.mm", "reference.gemm"]


def test_a_cuda_family_rejects_cpu_tensors_naming_both_devices(registry):
    registry.register(CudaGemm)
    told = rejection("CudaGemm", gemm_arguments(64, 64, 64, types=BF16))
    assert told.rule == "device"
    assert told.reason == "the operands are on cpu; the kernel runs on cuda"
    assert told.nearest == "would match with operands on cuda"


@pytest.mark.parametrize(
    "given", [{"types": ("float64",) * 3}, {"types": BF16, "layouts": "ttt"}, {"types": BF16}]
)
def test_another_device_is_told_only_if_nothing_else_is_in_the_way(registry, given):
    class ContiguousInK(CudaGemm):
        family = "k.major"
        operands = (
            Operands(A="bf16", B="bf16", out="f32", accumulator="f32", majors="A:k B:k out:n"),
        )

        @rule("K is a multiple of 32")
        def _(args):
            return args.K % 32 == 0

    provider = registry.register(ContiguousInK)
    (kernel,) = ka.get_kernels(providers=[provider])
    for K in (40, 64):
        args = gemm_arguments(64, 64, K, **{"layouts": "tnt", **given})
        told, status = rejection("k.major", args), kernel.supports(args)
        fits = given == {"types": BF16} and K == 64
        assert told.rule == status.rule == "device"
        assert told.nearest == status.nearest
        assert told.nearest == ("would match with operands on cuda" if fits else None)


def test_what_a_family_raises_of_operands_on_another_device_tells_no_nearest(registry):
    class Raising(CudaGemm):
        family = "raising"

        def _supports(self, args):
            raise RuntimeError("no such device")

    kernel, *_ = ka.get_kernels(providers=[registry.register(Raising)])
    args = gemm_arguments(64, 64, 64, types=BF16)
    for told in (rejection("raising", args), kernel.supports(args)):
        assert (told.rule, told.nearest) == ("device", None)


@pytest.mark.parametrize("kind", ["int16", "bool", "complex64"])
def test_an_odd_type_is_rejected_by_name_by_all_but_the_reference(registry, kind):
    registry.register(CudaGemm, LoopGemm)
    args = gemm_arguments(4, 4, 4, types=(kind,) * 3)
    told = ka.explain(args)
    assert families(told.accepted) == ["reference.gemm"]
    for found in told.rejected:
        assert found.rule in ("element types", "device", "the kind of operation")
    assert rejection("LoopGemm", args).reason == f"A is {kind}; expected float32"


def test_float64_is_taken_by_torch_and_reference_only(registry):
    registry.register(CudaGemm, LoopGemm)
    told = ka.explain(gemm_arguments(4, 4, 4, types=("float64",) * 3, device="meta"))
    assert families(told.accepted) == ["torch.mm", "reference.gemm"]
    reasons = {r.family: r.reason for r in told.rejected}
    assert reasons["CudaGemm"] == "A is float64; expected bfloat16"
    assert reasons["LoopGemm"] == "A is float64; expected float32"


# The nearest miss ------------------------------------------------------------------------


class AlignedOnly(CudaGemm):
    family = "aligned.gemm"
    operands = (
        Operands(
            A="bf16",
            B="bf16",
            out="f32",
            accumulator="f32",
            alignments=({"A": 16, "B": 16, "out": 16},),
            why_aligned="TMA needs leading dimensions that are multiples of 16 bytes",
        ),
    )


def test_a_misaligned_leading_dimension_names_reason_operand_bytes_and_padding(registry):
    registry.register(AlignedOnly)
    args = gemm_arguments(64, 64, 1001, types=BF16, device="meta")
    told = rejection("aligned.gemm", args)
    assert str(told) == (
        "TMA needs leading dimensions that are multiples of 16 bytes; A's is 2002 "
        "(would match with K padded to 1008)"
    )


@pytest.mark.parametrize(
    ("sizes", "layouts", "actual", "nearest"),
    [
        ((64, 64, 1001), "ttt", "A's is 2002", "K padded to 1008"),
        ((1001, 64, 64), "ntt", "A's is 2002", "M padded to 1008"),
        ((64, 1001, 64), "ttt", "B's is 2002", "N padded to 1008"),
        ((64, 1001, 1001), "ttt", "A's is 2002", "K padded to 1008 and with N padded to 1008"),
        ((64, 64, 1001), "nnt", "B's is 2002", "K padded to 1008"),
        ((64, 1001, 64), "tnt", "out's is 4004", "N padded to 1004"),
        ((1001, 64, 64), "ttn", "out's is 4004", "M padded to 1004"),
    ],
)
def test_the_nearest_aligned_size_is_named_by_the_letter_of_its_mode(
    registry, sizes, layouts, actual, nearest
):
    registry.register(AlignedOnly)
    args = gemm_arguments(*sizes, types=BF16, layouts=layouts, device="meta")
    told = rejection("aligned.gemm", args)
    assert told.reason.endswith(actual)
    assert told.nearest == f"would match with {nearest}"


def test_a_pitch_is_told_from_a_size(registry):
    registry.register(AlignedOnly)
    plain = gemm_arguments(64, 64, 64, types=BF16, device="meta")
    A = torch.empty(64, 67, dtype=torch.bfloat16, device="meta")[:, :64]
    told = rejection("aligned.gemm", ka.GemmArguments(A, plain.B.tensor, plain.out.tensor))
    assert told.reason.endswith("A's is 134")
    assert told.nearest == "would match with a pitch of 72 for A"


def test_a_misaligned_address_is_told_from_a_misaligned_stride(registry):
    registry.register(AlignedOnly)
    args = gemm_arguments(64, 64, 64, types=BF16, offsets=(0, 3, 0), device="meta")
    told = rejection("aligned.gemm", args)
    assert told.reason.endswith("B's address is 6 bytes off")
    assert told.nearest == "would match if B started at a multiple of 16 bytes"


def test_a_misaligned_batch_stride_is_told_from_a_misaligned_row(registry):
    registry.register(AlignedOnly)
    storage = torch.empty(100_000, dtype=torch.bfloat16, device="meta")
    A = storage.as_strided((2, 64, 64), (64 * 64 + 4, 64, 1))
    plain = gemm_arguments(64, 64, 64, 2, types=BF16, device="meta")
    told = rejection("aligned.gemm", ka.GemmArguments(A, plain.B.tensor, plain.out.tensor))
    assert told.reason.endswith("A's batch stride is 8200")
    assert told.nearest == "would match with batches 4104 apart"


def test_the_reason_of_a_misalignment_stays_when_a_family_has_several_alignments(registry):
    class TwoAlignments(AlignedOnly):
        family = "two.alignments"
        operands = (
            Operands(
                A="bf16", B="bf16", out="f32", accumulator="f32",
                alignments=({"A": 16}, {"A": 8}),
                why_aligned="copies are whole vectors",
            ),
        )  # fmt: skip

    registry.register(TwoAlignments)
    told = rejection("two.alignments", gemm_arguments(64, 64, 1001, types=BF16, device="meta"))
    assert told.reason.startswith("copies are whole vectors; A's is 2002")
    assert "A is A's" not in told.reason


def test_majors_are_named_by_letter_with_what_would_match(registry):
    class ContiguousInK(AlignedOnly):
        family = "k.major"
        operands = (
            Operands(A="bf16", B="bf16", out="f32", accumulator="f32", majors="A:k B:k out:n"),
        )

    registry.register(ContiguousInK)
    args = gemm_arguments(64, 64, 64, types=BF16, layouts="ttt", device="meta")
    told = rejection("k.major", args)
    assert told.rule == "majors"
    assert str(told) == "B is N-major; expected K-major (would match if B were K-major)"


def strided(shape, stride, offset=0, dtype=torch.bfloat16):
    memory = torch.empty(1 << 16, dtype=dtype, device="meta")
    return memory.as_strided(shape, stride, offset)


@pytest.mark.parametrize(
    ("A", "mended", "nearest"),
    [
        (
            strided((64, 64), (68, 1), 1),
            strided((64, 64), (72, 1)),
            "with a pitch of 72 for A and if A started at a multiple of 16 bytes",
        ),
        (
            strided((2, 64, 64), (4900, 68, 1), 2),
            strided((2, 64, 64), (4904, 72, 1)),
            "with a pitch of 72 for A and with batches 4904 apart and "
            "if A started at a multiple of 16 bytes",
        ),
    ],
)
def test_all_that_is_misaligned_of_an_operand_is_told(registry, A, mended, nearest):
    registry.register(AlignedOnly)
    batches = A.shape[0] if A.ndim == 3 else None
    plain = gemm_arguments(64, 64, 64, batches, types=BF16, device="meta")
    rest = plain.B.tensor, plain.out.tensor
    told = rejection("aligned.gemm", ka.GemmArguments(A, *rest))
    assert told.nearest == f"would match {nearest}"
    found = ka.explain(ka.GemmArguments(mended, *rest))
    assert "aligned.gemm" not in [one.family for one in found.rejected]


def test_batches_move_along_where_rows_are_padded(registry):
    registry.register(AlignedOnly)
    plain = gemm_arguments(63, 64, 61, 2, types=BF16, device="meta")
    assert rejection("aligned.gemm", plain).nearest == "would match with K padded to 64"


def test_majors_and_alignments_of_all_operands_are_told(registry):
    class ContiguousInK(AlignedOnly):
        family = "k.major"
        operands = (
            Operands(
                A="bf16", B="bf16", out="f32", accumulator="f32",
                majors="A:k B:k out:n",
                alignments=({"A": 16, "B": 16, "out": 16},),
            ),
        )  # fmt: skip

    registry.register(ContiguousInK)
    given = {"types": BF16, "device": "meta"}
    both = rejection("k.major", gemm_arguments(64, 64, 64, layouts="ntt", **given))
    assert both.nearest == "would match if A were K-major and if B were K-major"
    short = rejection("k.major", gemm_arguments(64, 60, 61, layouts="ntt", **given))
    assert short.nearest == (
        "would match if A were K-major, its rows 128 bytes apart and "
        "if B were K-major, its rows 128 bytes apart"
    )
    pitch = strided((64, 64), (68, 1))
    plain = gemm_arguments(64, 64, 64, layouts="ttt", **given)
    told = rejection("k.major", ka.GemmArguments(pitch, plain.B.tensor, plain.out.tensor))
    assert told.nearest == "would match with a pitch of 72 for A and if B were K-major"


def test_an_operand_without_unit_stride_is_told_to_be_made_contiguous(registry):
    registry.register(CudaGemm)
    storage = torch.empty(100_000, dtype=torch.bfloat16, device="meta")
    plain = gemm_arguments(64, 64, 64, types=BF16, device="meta")
    strided = storage.as_strided((64, 64), (256, 2))
    told = rejection("CudaGemm", ka.GemmArguments(strided, plain.B.tensor, plain.out.tensor))
    assert "A has strides (256, 2); one of its last two modes must have stride 1" in told.reason
    assert told.nearest == "would match with A.contiguous()"


def test_a_tf32_family_says_how_to_allow_it(registry):
    class Tf32(CudaGemm):
        family = "tf32.gemm"
        operands = (
            Operands(A="f32", B="f32", out="f32", accumulator="f32", multiplication="tf32"),
        )

    registry.register(Tf32)
    full = gemm_arguments(64, 64, 64, device="meta", fp32_precision="ieee")
    told = rejection("tf32.gemm", full)
    assert told.rule == "tfloat32 has to be allowed"
    assert "10 mantissa bits" in told.reason
    assert "fp32_precision='tf32'" in told.nearest
    assert "set_float32_matmul_precision('high')" in told.nearest
    allowed = gemm_arguments(64, 64, 64, device="meta", fp32_precision="tf32")
    assert "tf32.gemm" in families(ka.explain(allowed).accepted)


@pytest.mark.parametrize(("layouts", "device"), [("ttt", "meta"), ("tnt", "meta"), ("tnt", "cpu")])
def test_how_to_allow_tf32_is_told_only_if_nothing_else_is_in_the_way(registry, layouts, device):
    class Tf32(CudaGemm):
        family = "tf32.gemm"
        operands = (
            Operands(A="f32", B="f32", out="f32", accumulator="f32", multiplication="tf32",
                     majors="A:k B:k out:n"),
        )  # fmt: skip

    (kernel,) = ka.get_kernels(providers=[registry.register(Tf32)])
    given = {"layouts": layouts, "device": device}
    full = gemm_arguments(64, 64, 64, fp32_precision="ieee", **given)
    told, status = rejection("tf32.gemm", full), kernel.supports(full)
    assert told.nearest == status.nearest
    assert (told.nearest is not None) == (given == {"layouts": "tnt", "device": "meta"})
    allowed = gemm_arguments(64, 64, 64, fp32_precision="tf32", **given)
    assert bool(kernel.supports(allowed)) == (told.nearest is not None)


def test_alternatives_of_a_type_are_joined(registry):
    class Several(CpuGemm):
        family = "several"
        operands = (
            Operands(A="f16 | bf16 | f32", B="like A", out="f32", accumulator="any",
                     majors="strided"),
        )  # fmt: skip

    registry.register(Several)
    told = rejection("several", gemm_arguments(4, 4, 4, types=("int16",) * 3))
    assert told.reason == "A is int16; expected float16 or bfloat16 or float32"


def test_an_accumulator_is_told_with_both_types(registry):
    registry.register(CudaGemm)
    args = gemm_arguments(4, 4, 4, types=BF16, device="meta", accumulator_type="float64")
    told = rejection("CudaGemm", args)
    assert told.reason == "the accumulator is float64; expected float32"


def test_a_target_is_told_with_both_architectures(registry):
    registry.register(CudaGemm)
    args = gemm_arguments(64, 64, 64, types=BF16, device="meta")
    told = rejection("CudaGemm", args, cc=75)
    assert told.rule == "target"
    assert told.reason == "the kernel is for sm_80, the device is sm_75"


def test_an_epilogue_is_told_by_a_family_that_has_none(registry):
    registry.register(CudaGemm)
    plain = gemm_arguments(64, 64, 64, types=BF16, device="meta")
    epilogue = ka.EpilogueArguments(lambda accum: accum)
    told = rejection("CudaGemm", ka.GemmArguments(*plain.tensors, epilogue=epilogue))
    assert told.rule == "epilogue"


def test_the_refusal_that_came_furthest_is_the_one_that_is_told(registry):
    class Picky(AlignedOnly):
        family = "picky"

        @rule("N is a multiple of 128")
        def _(args):
            return args.N % 128 == 0

    registry.register(Picky)
    told = rejection("picky", gemm_arguments(64, 64, 64, types=BF16, device="meta"))
    assert told.reason == "N is a multiple of 128"


def test_a_family_without_kernels_says_so(registry):
    class Barren(LoopGemm):
        tiles = ()

    registry.register(Barren)
    assert rejection("Barren", gemm_arguments(4, 4, 4)).reason == "the family has no kernels"


def test_kernels_refused_by_the_callers_filter_are_told_so():
    told = ka.explain(gemm_arguments(4, 4, 4), metadata_filter=lambda m: m.provider == "torch")
    assert families(told.accepted) == ["torch.mm"]
    (found,) = [r for r in told.rejected if r.family == "reference.gemm"]
    assert found.reason == "metadata_filter refused the one design"
    assert found.rule == "metadata_filter"


# How it reads ----------------------------------------------------------------------------


@pytest.fixture
def explanation(registry):
    class Markup(CpuGemm):
        family = "<b>bold</b>"

        def _supports(self, args):
            return ka.Status.fail("K < 5 & N > 3", nearest='would match with "K" = 5')

    provider = registry.register(LoopGemm, Markup)
    return ka.explain(gemm_arguments(4, 4, 4), providers=[provider])


def test_text_has_the_problem_and_a_line_for_each_family(explanation):
    assert str(explanation).splitlines() == [
        "GemmArguments(4x4x4 (M x N x K), f32 x f32 -> f32, accumulated in f32, on cpu)",
        "yes: LoopGemm     2 designs",
        'no:  <b>bold</b>  K < 5 & N > 3 (would match with "K" = 5)',
    ]


def test_families_of_other_operations_share_a_line_of_the_text():
    told = ka.explain(gemm_arguments(4, 4, 4))
    others = [r.family for r in told.rejected if r.rule == "the kind of operation"]
    assert len(others) > 2
    *_, last = str(told).splitlines()
    assert last.startswith(f"no:  {len(others)} others")
    assert all(family in last for family in others)
    assert sum(family in str(told) for family in others) == len(others)


def test_one_design_is_singular(registry):
    provider = registry.register(CpuGemm)
    assert "1 design" in str(ka.explain(gemm_arguments(4, 4, 4), providers=[provider]))
    assert "1 designs" not in str(ka.explain(gemm_arguments(4, 4, 4), providers=[provider]))


def test_the_dictionary_is_ready_for_json(explanation):
    told = json.loads(json.dumps(explanation.to_dict()))
    assert told["accepted"] == [
        {
            "family": "LoopGemm",
            "provider": explanation.accepted[0].provider,
            "kernels": ["LoopGemm_tile16", "LoopGemm_tile32"],
        }
    ]
    (rejected,) = told["rejected"]
    assert rejected["family"] == "<b>bold</b>"
    assert rejected["reason"] == "K < 5 & N > 3"
    assert rejected["nearest"] == 'would match with "K" = 5'


def test_html_escapes_what_families_and_rules_are_called(explanation):
    html = explanation._repr_html_()
    assert "<b>" not in html
    assert "&lt;b&gt;bold&lt;/b&gt;" in html
    assert "K &lt; 5 &amp; N &gt; 3" in html
    assert html.count("<tr>") == 2


def test_an_unknown_provider_is_refused():
    with pytest.raises(ArgumentError, match="no provider is called"):
        ka.explain(gemm_arguments(4, 4, 4), providers=["cublas"])


def test_default_design_metadata_has_an_empty_label():
    assert DesignMetadata().label() == ""
    assert list(Space().designs(DesignMetadata)) == [DesignMetadata()]


@pytest.mark.parametrize("columns", [False, True])
def test_a_family_without_a_design_for_the_operands_says_so(registry, columns):
    """And does not ask for other operands, of which it has none either."""

    class NoDesign(ka.Kernel):
        family = "no.design"
        devices = ("cpu",)
        operands = (Operands(A="f32", B="f32", out="f32", accumulator="f32"),)
        space = Space()
        design = DesignMetadata

        @rule("there is a design")
        def _(design):
            return False

        def _run(self, args, artifact, stream, workspace=None):
            raise NotImplementedError

    registry.register(NoDesign)
    A, out = torch.ones(8, 8), torch.empty(8, 8)
    args = ka.GemmArguments(A, A.clone(), out.t() if columns else out)
    assert "leave no design for these operands" in rejection("no.design", args).reason
