"""What the norm families offer: queries, rules, metadata, compiled code, the command line."""

import json
import re

import pytest
import torch
from support.cute_on_cpu import lender
from support.norms import KINDS, LAYER, LAYER_BACKWARD, RMS, RMS_BACKWARD, Draw, arguments_for

import kernel_api as ka
from kernel_api import _workspaces, provider
from kernel_api._description import described, rebuilt
from kernel_api.cli._main import main
from kernel_api.metadata import KernelMetadata

(CUTEDSL,) = provider.providers(["cutedsl"])
FAMILIES = {f.family: f for f in CUTEDSL.families() if f.arguments in KINDS}
FAMILY_OF = {
    RMS: "sm80.rmsnorm",
    LAYER: "sm80.layernorm",
    RMS_BACKWARD: "sm80.rmsnorm_backward",
    LAYER_BACKWARD: "sm80.layernorm_backward",
}

every_family = pytest.mark.parametrize("name", FAMILIES)
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


def offered(args, **how):
    return ka.get_kernels(args, **{"providers": ["cutedsl"], "cc": 90, **how})


def meta(M=512, N=1024, element="bfloat16", **how):
    return Draw(M, N, element, device="meta", **how)


def refusal(args, family):
    (told,) = [r for r in ka.explain(args, cc=90).rejected if r.family == family]
    return told


# The query -------------------------------------------------------------------------------


def test_there_is_a_family_for_every_norm():
    of_8_bits = {"sm80.rmsnorm_quantize", "sm80.layernorm_quantize"}
    assert set(FAMILIES) == {*FAMILY_OF.values(), "sm80.rmsnorm_rht_amax", *of_8_bits}


@every_kind
def test_each_kind_of_arguments_is_for_its_own_family(kind):
    assert {k.family for k in offered(meta().arguments(kind))} == {FAMILY_OF[kind]}


def test_a_transform_or_a_maximum_is_for_the_family_of_its_own():
    draw = meta()
    for given in (
        {"hadamard": True},
        {"amax": draw.statistic((256,)), "rows_per_block": 2},
        {"global_amax": draw.statistic(())},
    ):
        args = draw.arguments(RMS, **given)
        assert {k.family for k in offered(args)} == {"sm80.rmsnorm_rht_amax"}
        assert "are of sm80.rmsnorm_rht_amax" in refusal(args, "sm80.rmsnorm").reason


@pytest.mark.parametrize("cc", [80, 86, 89, 90, 100, 120])
def test_every_gpu_from_ampere_on_is_served(cc):
    assert offered(meta().arguments(RMS), cc=cc)


def test_an_older_gpu_is_not():
    assert offered(meta().arguments(RMS), cc=75) == []


@every_kind
@pytest.mark.parametrize("N", [1, 2, 7, 64, 100, 1000, 4095, 8192, 8200, 20000, 50000, 100001])
@pytest.mark.parametrize(("element", "pad"), [("bfloat16", 0), ("float16", 1), ("float32", 3)])
def test_rows_of_any_length_and_pitch_are_served(kind, N, element, pad):
    draw = meta(33, N, element, pad=pad, offset=pad)
    kernels = offered(draw.arguments(kind, weight=draw.columns()))
    assert kernels
    assert all(kernel.supports(draw.arguments(kind)) for kernel in kernels[:1])


@every_kind
@pytest.mark.parametrize("N", [1, 7, 64, 1000, 4096, 8192, 16384, 50000])
@pytest.mark.parametrize("element", ["bfloat16", "float32"])
@pytest.mark.parametrize("of_residual", ["bfloat16", "float32"])
def test_rows_of_any_length_are_served_with_a_residual(kind, N, element, of_residual):
    draw = meta(33, N, element)
    names = ("residual", "residual_out") if kind in (RMS, LAYER) else ("dresidual",)
    given = {name: draw.matrix(element=of_residual) for name in names}
    kernels = offered(draw.arguments(kind, weight=draw.columns(), **given))
    assert kernels
    if N % 8 == 0 and N <= 8192 and (kind in (RMS, LAYER) or element == "bfloat16"):
        assert any(kernel.metadata.design.elements for kernel in kernels)


@pytest.mark.parametrize("element", ["float64", "float8_e4m3fn"])
@every_kind
def test_other_types_are_for_the_reference(kind, element):
    args = meta(16, 16, element).arguments(kind)
    assert offered(args) == []
    assert refusal(args, FAMILY_OF[kind]).rule == "element types"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda d: {"weight": d.columns(element="float64")}, "weight is float64"),
        (lambda d: {"weight": d.random((2 * d.N,))[::2]}, "weight has stride 2 .*contiguous"),
        (lambda d: {"x": d.random((d.N, d.M)).t()}, "x is M-major; expected N-major"),
        (lambda d: {"out": d.random((d.M, 2 * d.N))[:, ::2]}, "out has strides .* stride 1"),
    ],
)
def test_what_is_refused_is_told_with_the_nearest_that_would_match(make, words):
    draw = meta()
    args = draw.arguments(RMS, **make(draw))
    told = refusal(args, "sm80.rmsnorm")
    assert re.search(words, f"{told.reason} {told.nearest}")
    assert offered(args) == []


def test_a_weight_between_vectors_is_read_one_by_one():
    draw = meta()
    args = draw.arguments(RMS, weight=draw.random((draw.N + 1,))[1:])
    kernels = offered(args)
    assert kernels
    assert {k.metadata.operands.x.alignment for k in kernels} == {2}
    aligned = draw.arguments(RMS, weight=draw.columns())
    assert {k.metadata.operands.x.alignment for k in offered(aligned)} == {16, 4, 2}


def test_an_epilogue_is_refused_by_name_and_left_to_the_reference():
    args = meta().arguments(RMS, epilogue=ka.EpilogueArguments(lambda accum: 2 * accum))
    assert offered(args) == []
    assert refusal(args, "sm80.rmsnorm").rule == "epilogue"
    assert [k.family for k in ka.get_kernels(args, cc=90)] == ["reference.rmsnorm"]


def test_arguments_of_another_operation_are_refused_as_such():
    A = torch.empty(16, 16, dtype=torch.bfloat16, device="meta")
    told = refusal(ka.GemmArguments(A, A.clone(), A.clone()), "sm80.layernorm")
    assert told.reason == "the kernel computes LayerNormArguments, these are GemmArguments"
    args = meta().arguments(LAYER)
    assert refusal(args, "sm90.gemm").reason.startswith("the kernel computes GemmArguments")


@every_family
def test_the_query_is_the_enumeration_that_supports_the_arguments(name):
    family = FAMILIES[name]
    everything = family.generate_kernels(lambda metadata: True)
    for place, (M, N) in enumerate(((1, 16), (300, 48), (77, 1040), (4, 8192), (9, 33000))):
        kernel = everything[place * len(everything) // 5]
        args = arguments_for(kernel, M, N, device="meta")
        assert set(offered(args)) == {k for k in everything if k.supports(args)}
        assert kernel in offered(args)


# Which is best ---------------------------------------------------------------------------


@every_kind
def test_all_are_predicted_and_whole_vectors_in_shared_memory_are_best(kind):
    draw = meta(8192, 8192)
    args = draw.arguments(kind, weight=draw.columns())
    seconds = [kernel.predict(args) for kernel in offered(args)]
    assert seconds == sorted(seconds)
    best = offered(args)[0].metadata
    assert best.design.elements
    assert best.operands.x.alignment == 16
    matrices = len(best.operands.tensors)
    least = matrices * 8192 * 8192 * 2 / 4.8e12  # what an H200's memory moves at most
    assert least < seconds[0] < 2 * least


def test_few_rows_are_not_gathered_in_few_blocks():
    draw = meta(264, 8192)
    best = offered(draw.arguments(RMS))[0].metadata.design
    assert (best.turns, best.rows) == (1, 1)


def test_rows_too_long_for_shared_memory_are_streamed():
    draw = meta(64, 100_000)
    assert {k.metadata.design.elements for k in offered(draw.arguments(RMS))} == {0}


@pytest.mark.parametrize("kind", [RMS, RMS_BACKWARD])
@pytest.mark.parametrize("M", [8, 128])
def test_few_rows_that_are_streamed_have_many_threads(kind, M):
    draw = meta(M, 1 << 18)
    assert offered(draw.arguments(kind))[0].metadata.design.threads_per_row >= 512


@pytest.mark.parametrize("kind", [RMS, RMS_BACKWARD])
def test_no_more_rows_are_streamed_at_once_than_stay_in_L2_if_that_can_be(kind):
    draw = meta(8192, 1 << 16)
    best, *others = offered(draw.arguments(kind))
    assert best.metadata.design.threads == best.metadata.design.threads_per_row == 1024
    assert {k.metadata.design.elements for k in others} == {0}


def test_sums_over_rows_that_are_streamed_take_a_second_reading():
    draw = meta(1024, 1 << 16)
    sums = {name: draw.columns(read=False) for name in ("dweight", "dbias")}
    plain, both = draw.arguments(LAYER_BACKWARD), draw.arguments(LAYER_BACKWARD, **sums)
    kernel = offered(both)[0]
    again = 2 * 1024 * (1 << 16) * 2 / 4.3e12
    assert again < kernel.predict(both) - kernel.predict(plain) < 1.5 * again


def with_both_sums(N, weight):
    draw = meta(512, N)
    sums = {name: draw.columns(read=False) for name in ("dweight", "dbias")}
    return draw.arguments(LAYER_BACKWARD, weight=draw.columns(element=weight), **sums)


@pytest.mark.compile
@pytest.mark.parametrize("cc", ["80", "90a"])
@pytest.mark.parametrize(("N", "weight"), [(16384, "bfloat16"), (8192, "float32")])
def test_both_sums_over_long_rows_are_kept_in_registers(cc, N, weight):
    args = with_both_sums(N, weight)
    best = offered(args)[0]
    assert best.metadata.design.elements
    assert best.compile(args, cc).resources.spill_bytes == 0


def test_weights_of_32_bits_leave_registers_for_fewer_sums():
    assert not offered(with_both_sums(16384, "float32"))[0].metadata.design.elements


@pytest.mark.parametrize("kind", [RMS_BACKWARD, LAYER_BACKWARD], ids=lambda kind: kind.__name__)
def test_every_gradient_that_is_listed_takes_something(kind):
    for kernel in FAMILIES[FAMILY_OF[kind]].generate_kernels(lambda metadata: True):
        status = kernel.supports(rebuilt(described(arguments_for(kernel, 5, 100))))
        assert status, f"{kernel.metadata.kernel_name}: {status}"


def crowded(args):
    return [k for k in offered(args) if k.metadata.design.is_crowded]


@pytest.mark.parametrize("kind", [RMS_BACKWARD, LAYER_BACKWARD], ids=lambda kind: kind.__name__)
def test_threads_that_share_out_registers_read_16_bits(kind):
    draw = meta(4096, 5120)
    (kernel, *_) = crowded(draw.arguments(kind, weight=draw.columns()))
    told = kernel.supports(draw.arguments(kind, weight=draw.columns(element="float32")))
    assert "where what is beside has 16 bits; weight is float32" in str(told)
    wide = meta(4096, 5120, "float32")
    assert not crowded(wide.arguments(kind, weight=wide.columns()))


def test_those_of_a_layer_norm_take_no_dresidual():
    draw = meta(4096, 5120)
    (kernel, *_) = crowded(draw.arguments(LAYER_BACKWARD))
    told = kernel.supports(draw.arguments(LAYER_BACKWARD, dresidual=draw.matrix()))
    assert not told
    assert not crowded(draw.arguments(LAYER_BACKWARD, dresidual=draw.matrix()))


@pytest.mark.compile
@pytest.mark.parametrize("kind", [RMS_BACKWARD, LAYER_BACKWARD], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("N", [1280, 2560, 3072, 5120])
def test_threads_that_share_out_registers_spill_nothing(kind, N):
    draw = meta(4096, N)
    sums = ("dweight",) if kind is RMS_BACKWARD else ("dweight", "dbias")
    given = {name: draw.columns(read=False, element="float32") for name in sums}
    args = draw.arguments(kind, weight=draw.columns(), **given)
    kernel = crowded(args)[0]
    resources = kernel.compile(args, cc="sm_90").resources
    design = kernel.metadata.design
    assert resources.spill_bytes == 0
    assert design.threads * design.resident * resources.registers <= 64 * 1024


# Metadata --------------------------------------------------------------------------------


@every_family
def test_the_implementation_is_what_the_metadata_says(name):
    for kernel in FAMILIES[name].generate_kernels(lambda metadata: True):
        design, operands = kernel.metadata.design, kernel.metadata.operands
        built = kernel.implementation()
        assert (built.threads, built.rows.per_row) == (design.threads, design.threads_per_row)
        assert built.stages == design.stages
        assert built.vectors * built.rows.vector == design.elements
        assert built.rows.vector * operands.x.dtype.itemsize == operands.x.alignment
        assert built.centred == ("layernorm" in name)
        assert getattr(built, "turns", None) == getattr(design, "turns", None)


@every_family
def test_names_are_unique_and_metadata_comes_back_from_json(name):
    kernels = FAMILIES[name].generate_kernels(lambda metadata: True)
    assert len({k.metadata.kernel_name for k in kernels}) == len(kernels)
    for kernel in kernels[::17]:
        again = KernelMetadata.from_json(kernel.metadata.to_json())
        assert again == kernel.metadata
        assert again.rebuild() == kernel


def test_a_workspace_is_asked_for_sums_over_rows_and_maxima_only():
    draw = meta(1000, 4096)
    plain = draw.arguments(LAYER_BACKWARD)
    one = draw.arguments(LAYER_BACKWARD, dbias=draw.columns(read=False))
    both = draw.arguments(
        LAYER_BACKWARD, dbias=draw.columns(read=False), dweight=draw.columns(read=False)
    )
    kernel = offered(both)[0]
    sizes = [kernel.get_workspace_size(args) for args in (plain, one, both)]
    assert sizes[0] == 0
    assert sizes[2] - 65536 == 2 * (sizes[1] - 65536)
    assert offered(draw.arguments(RMS))[0].get_workspace_size(draw.arguments(RMS)) == 0
    maximum = draw.arguments(RMS, global_amax=draw.statistic(()))
    assert offered(maximum)[0].get_workspace_size(maximum) == 65536


def test_launches_borrow_what_the_sums_that_they_are_asked_for_take(monkeypatch):
    borrowed, draw = [], meta(1000, 4096)
    monkeypatch.setattr(_workspaces, "lender", lender(borrowed))
    for names in ((), ("dbias",), ("dweight", "dbias")):
        sums = {name: draw.columns(read=False) for name in names}
        args = draw.arguments(RMS_BACKWARD, **sums)
        kernel, values = offered(args)[0], dict(args.launch_values)
        launch = kernel._with_more(lambda *given: None, 0, tuple(values))
        launch(*args.tensors[: len(args.operands)], **values)
        assert sum(borrowed) == kernel.get_workspace_size(args)
        borrowed.clear()


@pytest.mark.parametrize("kind", [RMS_BACKWARD, LAYER_BACKWARD])
@pytest.mark.parametrize(("M", "N"), [(4, 1 << 15), (4096, 1 << 17), (8, 1 << 20), (3, 100)])
def test_there_are_no_parts_of_sums_for_rows_that_are_not_there(kind, M, N):
    draw = meta(M, N)
    sums = {name: draw.columns(read=False) for name in ("dweight", "dbias")}
    args = draw.arguments(kind, **sums)
    for kernel in offered(args):
        design, size = kernel.metadata.design, kernel.get_workspace_size(args) - 65536
        assert size <= 2 * 4 * N * -(-M // (design.rows if design.elements else 16))
        assert size <= max(4 * (2 * M * N), 1 << 20), "more than four times what x has"
        assert kernel._workspace_finder(tuple(sums))(args.tensors, {}) == size + 65536


# Compiled --------------------------------------------------------------------------------


@pytest.mark.compile
def test_an_artifact_serves_every_size_of_its_signature_and_no_other(cache_directory):
    draw = meta(64, 1024)
    args = draw.arguments(RMS, weight=draw.columns())
    kernel = offered(args)[0]
    artifact = kernel.compile(args, cc=90)
    assert artifact.resources.spill_bytes == 0
    wider = meta(4096, 896)
    assert kernel.compile(wider.arguments(RMS, weight=wider.columns()), cc=90) is artifact
    assert kernel.compile(draw.arguments(RMS), cc=90) is not artifact
    assert list(cache_directory.rglob("*.json"))


@pytest.mark.compile
def test_a_compiled_norm_is_exported_and_read_back(tmp_path):
    draw = meta(64, 512)
    args = draw.arguments(RMS, global_amax=draw.statistic(()))
    kernel = offered(args)[0]
    found = ka.load(kernel.compile(args, cc=90).export(tmp_path / "norm.so"))
    assert found.kernel == kernel
    assert found.signature == args.signature


# The command line ------------------------------------------------------------------------


def told(capsys, *words):
    code = main([*words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_explain_describes_a_norm(capsys):
    code, found = told(
        capsys, "explain", "--operation", "rmsnorm_rht_amax", "--m", "8", "--n", "256", "--cc", "90"
    )
    assert code == 0
    assert found["problem"].startswith("RmsNormArguments(8x256 (M x N), bf16 -> bf16")
    assert "sm80.rmsnorm_rht_amax" in {one["family"] for one in found["accepted"]}


@pytest.mark.parametrize(
    "operation",
    ["rmsnorm", "layernorm", "rmsnorm_backward", "layernorm_backward", "rmsnorm_rht_amax"],
)
def test_verify_runs_every_norm_with_padded_rows(capsys, operation):
    problem = ("--operation", operation, "--m", "19", "--n", "48", "--device", "cpu")
    code, found = told(
        capsys, "verify", *problem, "--pad", "3", "--offset", "1", "--dtype", "float32"
    )
    assert code == 0
    assert found["passed"]
    assert {one["verdict"] for one in found["outcomes"]} == {"passed"}


@pytest.mark.parametrize(
    "option", [("--batch", "3"), ("--layout", "tn"), ("--accumulator", "float32")]
)
def test_options_of_products_are_refused(capsys, option):
    assert main(["explain", "--operation", "layernorm", *option]) == 2
    assert "it is an option of gemm" in capsys.readouterr().err


@pytest.mark.compile
@pytest.mark.parametrize(
    ("kind", "N", "threads"), [(LAYER_BACKWARD, 16384, 1024), (RMS, 16384, 512), (LAYER, 8192, 128)]
)
def test_rows_beside_a_residual_spill_nothing(kind, N, threads):
    """Of float32, which takes the most registers."""
    draw = meta(4096, N)
    names = ("residual", "residual_out") if kind in (RMS, LAYER) else ("dresidual",)
    given = {name: draw.matrix(element="float32") for name in names}
    if kind is LAYER_BACKWARD:
        given |= {
            name: draw.columns(read=False, element="float32") for name in ("dweight", "dbias")
        }
    args = draw.arguments(kind, weight=draw.columns(element="float32"), **given)
    (kernel, *_) = (k for k in offered(args) if k.metadata.design.threads == threads)
    assert kernel.compile(args, cc="sm_90").resources.spill_bytes == 0


@pytest.mark.compile
@pytest.mark.parametrize(
    ("columns", "warps"),
    [(128, 32), (8192, 32), (10240, 24), (16384, 16), (32768, 8), (65536, 8), (0, 8)],
)
def test_sums_over_rows_are_added_up_by_blocks_that_run_at_once(columns, warps):
    """Of 132 multiprocessors with 64 warps each, if a block has as few as eight."""
    from kernel_api.implementations.common.column_sums import ColumnSums

    sums = ColumnSums(columns, False)
    assert sums.warps == warps and sums.threads == 32 * warps
    blocks = -(-columns // 32)
    assert warps == ColumnSums.fewest or blocks * warps <= 132 * 64
