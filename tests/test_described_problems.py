"""Products of groups and attention, from the options and lists that describe problems."""

import argparse
import inspect
import json
import re

import pytest

import kernel_api as ka
from kernel_api import masks
from kernel_api.cli._fused_problem import names_of
from kernel_api.cli._grouped_problem import GROUPED
from kernel_api.cli._measured import label
from kernel_api.cli._problem import add_problem_options, problem_arguments
from kernel_api.cli._problem_list import problems
from kernel_api.errors import ArgumentError
from kernel_api.ops import FORMS, GROUPED_FORMS
from kernel_api.tuning import Problem


def options(*words, device="meta"):
    parser = argparse.ArgumentParser()
    add_problem_options(parser, devices=("meta", "cpu"), device=device)
    return parser.parse_args([str(word) for word in words])


def listed(folder, *objects):
    """The problems of a file that has these."""
    path = folder / "list.json"
    path.write_text(json.dumps(objects))
    return problems(path, options())


# Groups ----------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", GROUPED)
@pytest.mark.parametrize("further", [{}, {"alpha": 0.5}])
def test_every_product_of_groups_gives_arguments_that_some_kernel_takes(
    tmp_path, operation, further
):
    entry = {"op": operation, "M": 32, "N": 128, "K": 64, "groups": 3, "dtype": "f32", **further}
    (args,) = listed(tmp_path, entry)
    assert (args.kind, args.M, args.N, args.K, args.L) == ("grouped_gemm", 32, 128, 64, 3)
    assert args.ragged == ("K" if operation == "grouped_gemm_wgrad" else "M")
    assert (args.epilogue is None) == (operation in GROUPED[:2] and not further)
    assert ka.get_kernels(args, providers=["reference"])


def test_groups_cover_all_tokens_and_rows_are_picked_each_once():
    names = ("row_index", "out_row_index", "prob", "bias")
    named = [one for name in names for one in ("--with", name)]
    sizes = ("--m", 37, "--n", 16, "--k", 8, "--groups", 5, "--device", "cpu")
    args = problem_arguments(options("--operation", "grouped_gemm", *sizes, *named))
    ends = args.offsets.tensor
    assert ends.tolist() == sorted(ends.tolist()) and ends[-1] == 37 and len(ends) == 5
    assert args.row_index.tensor.sort().values.tolist() == list(range(37))
    assert set(args.epilogue.operands) == {"prob", "bias"}
    assert args.epilogue.operands["bias"].shape == (5, 1, 16)


@pytest.mark.parametrize("scales", ["per_tensor", "per_row", "blocks", "per_row-per_tensor"])
def test_experts_may_carry_scales(tmp_path, scales):
    sizes = {"M": 256, "N": 512, "K": 300, "groups": 3}
    types = {"dtype": "e4m3", "out_dtype": "bf16", "layout": "tn"}
    (args,) = listed(
        tmp_path, {"op": "grouped_gemm", **sizes, **types, "scales": scales}
    )  # fmt: skip
    assert args.scaled == ("A", "B")
    assert ka.get_kernels(args, providers=["reference"])


# Attention -------------------------------------------------------------------------------

ATTENTION_CASES = [
    ({}, {}),
    ({"causal": "true"}, {"mask": masks.Causal()}),
    ({"causal": "true", "alignment": "bottom_right"}, {"mask": masks.Causal("bottom_right")}),
    ({"causal": "true", "window": 7}, {"mask": masks.SlidingWindow(7, 0)}),
    ({"window": 7, "window_right": 2}, {"mask": masks.SlidingWindow(7, 2)}),
    ({"softcap": 30.0, "scale": 0.5}, {"softcap": 30.0, "scale": 0.5}),
]


@pytest.mark.parametrize(("named", "expected"), ATTENTION_CASES)
@pytest.mark.parametrize("operation", ["sdpa", "sdpa_backward"])
def test_attention_has_its_options(tmp_path, operation, named, expected):
    entry = {"op": operation, "M": 33, "N": 40, "K": 64, "L": 2, "heads": 6, "heads_kv": 3, **named}
    (args,) = listed(tmp_path, {**entry, "d_v": 32})
    given = (args.B, args.H, args.H_kv, args.S_q, args.S_kv, args.D, args.V.shape[-1])
    assert given == (2, 6, 3, 33, 40, 64, 32)
    assert all(getattr(args, name) == value for name, value in expected.items())
    assert ka.get_kernels(args, providers=["reference"])


def test_attention_has_its_operands(tmp_path):
    entry = {"op": "sdpa", "M": 1, "N": 60, "K": 64, "heads": 4, "dtype": "e4m3", "lse": "true"}
    (args,) = listed(tmp_path, entry)
    assert (args.out.dtype.short, args.lse.shape) == ("bf16", (1, 4, 1))
    assert {"descale_q", "descale_k", "descale_v"} <= args.further.keys()
    named = {"alibi": "true", "bias": "true", "sink": "true", "dropout": 0.25, "padding": "true"}
    (args,) = listed(tmp_path, {**entry, **named, "dtype": "f16"})
    assert {"alibi", "bias", "sink", "seq_lens_q", "seq_lens_kv"} <= args.further.keys()
    assert args.dropout.p == 0.25
    (args,) = listed(tmp_path, {**entry, "dtype": "f16", "page_size": 16, "L": 2})
    assert args.is_paged and args.K.shape == (8, 4, 16, 64)
    (args,) = listed(tmp_path, {**entry, "dtype": "f16", "page_size": 16, "padding": "true"})
    assert args.is_paged and {"seq_lens_q", "seq_lens_kv"} <= args.further.keys()
    (args,) = listed(tmp_path, {**entry, "dtype": "f16", "values_in_keys": "true", "d_v": 32})
    assert args.values_in_keys and args.V.address == args.K.address
    (args,) = listed(tmp_path, {**entry, "dtype": "f64", "sink": "true", "alibi": "true"})
    assert args.sink.dtype is args.alibi.dtype is args.lse.dtype is args.Q.dtype
    (args,) = listed(tmp_path, {**entry, "L": 0})
    assert args.B == 0
    (args,) = listed(tmp_path, {**entry, "dtype": "f16", "bshd": "true", "M": 5})
    assert args.Q.shape == (1, 4, 5, 64) and args.Q.stride[1:] == (64, 256, 1)


def test_gradients_of_bias_and_sink_are_asked_for_with_them(tmp_path):
    entry = {"op": "sdpa_backward", "M": 8, "N": 8, "K": 16, "bias": "true", "sink": "true"}
    (args,) = listed(tmp_path, {**entry, "deterministic": "true"})
    assert {"dBias", "dSink"} <= args.further.keys() and args.deterministic


ROPE = {"op": "gemm_rope"}


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"op": "gemm", "groups": 4}, "--groups is 4; gemm has no such thing, grouped_gemm and"),
        ({"op": "rmsnorm", "K": None, "heads": 4}, "--heads is 4; rmsnorm has no such thing"),
        ({"op": "grouped_gemm", "L": 2}, "--batch is 2; grouped products have --groups"),
        ({"op": "grouped_gemm_glu", "accumulator": "f32"}, "only a gemm without an epilogue"),
        ({"op": "sdpa", "layout": "tn"}, "--layout is 'tn'; it is an option of gemm, attention"),
        ({"op": "gemm", "lse": "true"}, "gemm, --with: there is no lse; there are alpha, C"),
        ({"op": "gemm_swiglu", "N": 64, "kind": "glu"}, "gemm_swiglu, --with: there is no kind;"),
        ({"op": "gemm_amax", "cos": "true"}, "gemm_amax, --with: there is no cos; there are amax,"),
        ({"op": "grouped_gemm", "sin": "true"}, "grouped_gemm, --with: there is no sin; there are"),
        ({**ROPE, "head_dim": "abc"}, "head_dim is 'abc'; expected a whole number of columns"),
        ({**ROPE, "head_dim": "nan"}, "head_dim is nan; expected a whole number of columns"),
        ({**ROPE, "head_dim": "inf"}, "head_dim is inf; expected a whole number of columns"),
        ({**ROPE, "head_dim": 8, "width": "abc"}, "width is 'abc'; expected a whole number of"),
        ({**ROPE, "head_dim": 8, "start": "abc"}, "start is 'abc'; expected a whole number of"),
        ({**ROPE, "head_dim": 8, "start": 20}, "start 20; expected an even width that fits head_"),
        ({"op": "sdpa", "kind": "geglu"}, "sdpa, --with: there is no kind; there are alibi"),
        ({"op": "sdpa", "alignment": "top_left"}, "it is of causal or window; name one of them"),
        ({"op": "sdpa", "deterministic": "true"}, "sdpa_backward takes it"),
        ({"op": "sdpa_backward", "page_size": 16}, "--with page_size: sdpa takes it"),
        (
            {"op": "sdpa_backward", "values_in_keys": "true"},
            "--with values_in_keys: sdpa takes it",
        ),
        ({"op": "sdpa", "heads": 3, "heads_kv": 2}, "3 heads"),
    ],
)
def test_options_that_an_operation_has_not_are_refused(tmp_path, entry, words):
    sizes = {"M": 8, "N": 16, "K": 32}
    with pytest.raises(ArgumentError, match=re.escape(words)):
        listed(tmp_path, {**sizes, **entry})


@pytest.mark.parametrize(
    "form", [form for form, _ in (*FORMS, *GROUPED_FORMS)], ids=lambda f: f.name
)
def test_every_fusion_says_what_it_takes(form):
    names = names_of(form)
    assert not {"A", "B", "out", "options"} & {*names}
    kinds = [one.kind for one in inspect.signature(form.fusion).parameters.values()]
    assert inspect.Parameter.VAR_KEYWORD not in kinds


def test_problems_are_named_by_what_is_computed(tmp_path):
    sizes = {"M": 8, "N": 16, "K": 32}
    found = listed(
        tmp_path,
        {"op": "grouped_gemm", **sizes, "groups": 3},
        {"op": "grouped_gemm_wgrad", **sizes, "groups": 3},
        {"op": "sdpa", **sizes, "L": 2, "heads": 4},
        {"op": "sdpa_backward", **sizes},
    )
    assert [label(Problem.of(args)) for args in found] == [
        "grouped_gemm 3 x 8x16x32 bf16 x bf16 -> bf16 ttt",
        "grouped_gemm 3 x 8x16x32 bf16 x bf16 -> bf16 ttt",
        "sdpa 2 x 4 x 8x16x32 bf16 x bf16 x bf16 -> bf16 tttt",
        "sdpa_backward 1 x 1 x 8x16x32 bf16 x bf16 x bf16 -> bf16 tttt",
    ]
