"""What fusions make of their operands: identities, absent terms, refusals."""

import re

import pytest
import torch
from support.data import gemm_tensors

import kernel_api as ka
from kernel_api.epilogue import Graph
from kernel_api.errors import ArgumentError, EpilogueError

M, N, K = 6, 64, 16
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu


def matrix(columns=N, *batch):
    return torch.empty(*batch, M, columns)


#: Every fusion with all that it takes; out is (M, N) unless it says otherwise.
CASES = {
    "gemm": {"alpha": 0.5, "C": matrix(), "beta": 0.25, "bias": torch.ones(N)},
    "gemm_bias_activation": {
        "alpha": 0.5,
        "bias": torch.ones(N),
        "preactivation": matrix(),
    },
    "gemm_residual": {"alpha": 0.5, "C": matrix(), "beta": 0.25, "bias": torch.ones(N)},
    "gemm_amax": {"alpha": 0.5, "amax": torch.empty(())},
    "gemm_glu": {
        "out": matrix(N // 2),
        "kind": "geglu_clamped",
        "alpha": 0.5,
        "bias": torch.ones(N),
        "prob": torch.ones(M),
        "preactivation": matrix(),
        "limit": 5.0,
        "offset": 0.5,
    },
    "gemm_swiglu": {"out": matrix(N // 2), "alpha": 0.5},
    "gemm_geglu": {"out": matrix(N // 2), "alpha": 0.5},
    "gemm_reglu": {"out": matrix(N // 2), "alpha": 0.5},
    "gemm_dglu": {
        "out": matrix(2 * N),
        "kind": "geglu_clamped",
        "alpha": 0.5,
        "preactivation": matrix(2 * N),
        "prob": torch.ones(M),
        "dprob": torch.empty(M),
        "dbias": torch.empty(2 * N),
        "limit": 5.0,
        "offset": 0.5,
    },
    "gemm_dswiglu": {"out": matrix(2 * N), "alpha": 0.5, "preactivation": matrix(2 * N)},
    "gemm_recompute_dglu": {
        "alpha": 0.5,
        "upstream": matrix(N // 2),
        "bias": torch.ones(N),
        "dbias": torch.empty(N),
    },
    "gemm_srelu": {"alpha": 0.5, "prob": torch.ones(M), "preactivation": matrix()},
    "gemm_dsrelu": {"alpha": 0.5, "preactivation": matrix(), "dprob": torch.empty(M)},
    "gemm_dactivation": {"alpha": 0.5, "preactivation": matrix(), "dbias": torch.empty(N)},
    "gemm_recompute_dsrelu": {"alpha": 0.5, "upstream": matrix(), "dprob": torch.empty(M)},
    "gemm_recompute_dactivation": {"alpha": 0.5, "upstream": matrix(), "bias": torch.ones(N)},
    "gemm_rope": {"cos": torch.ones(M, 8), "sin": torch.ones(M, 8), "head_dim": 16},
    "gemm_quantize": {
        "out": matrix().to(E4M3),
        "scale": 0.5,
        "alpha": 0.5,
        "bias": torch.ones(N),
        "amax": torch.empty(()),
    },
    "gemm_dropout": {"p": 0.25, "seed": 1, "offset": 2, "alpha": 0.5},
}
SCALED = ka.ScaledOperand(torch.ones(M), torch.tensor(2.0), ka.ScaleMode.PER_TENSOR)
FACTORS = ("alpha", "beta", "limit", "offset", "scale", "p", "seed")


def made(name, **changes):
    A, B, out = gemm_tensors(M, N, K)
    given = {"out": out, **CASES[name], **changes}
    return getattr(ka.fusions, name)(A, B, **given)


def test_every_fusion_is_here():
    assert [n for n in ka.fusions.__all__ if n.startswith("gemm")] == sorted(CASES)


@pytest.mark.parametrize("name", CASES)
def test_a_fusion_is_documented_and_takes_keywords_only(name):
    assert getattr(ka.fusions, name).__doc__
    with pytest.raises(TypeError, match="positional"):
        getattr(ka.fusions, name)(*gemm_tensors(M, N, K))


@pytest.mark.parametrize("name", CASES)
def test_arguments_are_answered_by_the_reference(name):
    args = made(name)
    (kernel,) = ka.get_kernels(args, providers=["reference"])
    assert Graph.from_json(args.epilogue.graph.to_json()) == args.epilogue.graph
    assert kernel.supports(args)


# Identity --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_a_new_factor_is_the_same_epilogue_with_the_same_keys(name):
    one = made(name)
    for factor in FACTORS:
        if factor not in CASES[name]:
            continue
        whole = name == "gemm_dropout" and factor in ("seed", "offset")
        least = 2 if factor == "scale" else 0
        for value in (1, 3, 2**40) if whole else (1, least, 0.875):
            other = made(name, **{factor: value})
            assert other.epilogue.graph == one.epilogue.graph
            assert other.signature == one.signature
            assert other.key[0] == one.key[0]
            assert type(other.epilogue.scalars[factor]) is (int if whole else float)


def test_a_new_factor_compiles_nothing():
    """A kernel that takes any epilogue is compiled once."""
    A, B, out = gemm_tensors(M, N, K)
    kernel = ka.get_kernels(made("gemm_amax"), providers=["reference"])[0]
    artifacts = set()
    for alpha in (0.5, 1.0, 2, -3.5):
        args = ka.fusions.gemm_amax(A, B, out=out, amax=torch.empty(()), alpha=alpha)
        artifacts.add(id(kernel.compile(args)))
        kernel.run(args)
        torch.testing.assert_close(out, alpha * (A @ B))
    assert len(artifacts) == 1


def test_sizes_are_the_same_epilogue():
    expected = made("gemm_swiglu").epilogue.graph
    for extents in ((1, 64), (33, 640)):
        A, B, _ = gemm_tensors(*extents, K)
        out = torch.empty(extents[0], extents[1] // 2)
        assert ka.fusions.gemm_swiglu(A, B, out=out).epilogue.graph == expected


def test_a_function_is_traced_once_for_operands_alike(monkeypatch):
    from kernel_api.arguments import epilogue

    made("gemm_swiglu")
    monkeypatch.setattr(epilogue, "trace", None)
    made("gemm_swiglu", alpha=3.0)


def test_operands_are_not_kept():
    import gc
    import weakref

    C = torch.empty(M, N)
    kept = weakref.ref(C)
    made("gemm_residual", C=C)
    del C
    gc.collect()
    assert kept() is None


def size(graph):
    return len(graph.nodes) + len(graph.outputs)


@pytest.mark.parametrize("name", CASES)
def test_an_absent_term_is_absent(name):
    full = made(name).epilogue
    for term in ("bias", "prob", "C", "preactivation", "amax", "dprob", "dbias"):
        required = {"preactivation": ("gemm_d",), "C": ("gemm_residual",), "amax": ("gemm_amax",)}
        if term not in CASES[name] or name.startswith(required.get(term, ())):
            continue
        without = made(name, **{term: None} | ({"beta": 1.0} if term == "C" else {})).epilogue
        assert set(full.operands) - set(without.operands) >= {term}
        assert without.graph != full.graph
        assert size(without.graph) < size(full.graph)


@pytest.mark.parametrize("name", CASES)
def test_no_factor_at_all_leaves_no_trace(name):
    if "alpha" not in CASES[name]:
        return
    args = made(name, alpha=None)
    assert "alpha" not in args.epilogue.operands
    assert size(args.epilogue.graph) < size(made(name).epilogue.graph)
    (kernel,) = ka.get_kernels(args, providers=["reference"])
    kernel.run(args)


@pytest.mark.parametrize("granularity", [1, 32, "halves"])
def test_pairs_are_part_of_the_identity(granularity):
    graphs = {
        made("gemm_swiglu", order=order, granularity=granularity).epilogue.graph
        for order in ("gate_up", "up_gate")
    }
    assert len(graphs) == 2


def test_an_epilogue_of_the_users_takes_the_place_of_all_terms():
    epilogue = ka.EpilogueArguments(lambda accum: accum * accum)
    A, B, out = gemm_tensors(M, N, K)
    assert ka.fusions.gemm(A, B, out=out, epilogue=epilogue).epilogue.fn is epilogue.fn
    with pytest.raises(ArgumentError, match="epilogue is given and so is one of alpha, C, bias"):
        ka.fusions.gemm(A, B, out=out, epilogue=epilogue, alpha=2)


# Refusals --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gemm", {"out": matrix(N + 1)}, "out has shape (6, 65); expected (6, 64)"),
        ("gemm", {"C": matrix(N + 1)}, "C has shape (6, 65); expected (6, 64)"),
        ("gemm", {"C": torch.ones(N)}, "C has shape (64,); expected (6, 64)"),
        ("gemm", {"bias": torch.ones(M)}, "bias has shape (6,); expected (64,)"),
        ("gemm", {"C": None}, "beta is 0.25 and there is no C"),
        ("gemm", {"alpha": True}, "alpha is True; expected a number"),
        ("gemm", {"alpha": "1"}, "alpha is a str"),
        ("gemm", {"alpha": torch.ones(N)}, "alpha has shape (64,); expected one number"),
        ("gemm", {"beta": torch.ones(M, 1)}, "beta has shape (6, 1); expected one number"),
        ("gemm", {"activation": "mish"}, "activation is 'mish'; expected one of relu, leaky_relu"),
        ("gemm_residual", {"C": None}, "C is None; gemm_residual adds it"),
        ("gemm_amax", {"amax": None}, "amax is None; gemm_amax writes it"),
        ("gemm_amax", {"amax": torch.empty(3)}, "amax has shape (3,); expected ()"),
        ("gemm_amax", {"out": None}, "out is a NoneType"),
        (
            "gemm_bias_activation",
            {"preactivation": matrix(N // 2)},
            "preactivation has shape (6, 32); expected (6, 64)",
        ),
        ("gemm_glu", {"kind": "mish"}, "kind is 'mish'; expected one of glu, swiglu, geglu"),
        ("gemm_glu", {"order": "up"}, "order is 'up'; expected one of up_gate, gate_up"),
        ("gemm_glu", {"granularity": 0}, "granularity is 0; expected a number of columns, or"),
        ("gemm_glu", {"granularity": 48}, "B has N = 64; pairs of 48 columns need a multiple of"),
        ("gemm_glu", {"out": matrix()}, "out has shape (6, 64); expected (6, 32)"),
        ("gemm_glu", {"prob": torch.ones(5)}, "prob has shape (5,); expected (6,) or (6, 1)"),
        ("gemm_glu", {"limit": torch.ones(N // 2)}, "limit has shape (32,); expected one number"),
        ("gemm_glu", {"offset": torch.ones(M, 1)}, "offset has shape (6, 1); expected one number"),
        ("gemm_glu", {"prob": SCALED}, "prob is a ScaledOperand; expected a plain tensor"),
        ("gemm_glu", {"kind": "geglu"}, "limit is 5.0 and kind is 'geglu'"),
        ("gemm_swiglu", {"offset": 1.0}, "offset is 1.0 and kind is 'swiglu'"),
        ("gemm_dglu", {"preactivation": None}, "preactivation is None; expected a tensor (6, 128)"),
        ("gemm_dglu", {"preactivation": matrix()}, "has shape (6, 64); expected (6, 128)"),
        ("gemm_dglu", {"dprob": torch.ones(M, 1)}, "dprob has shape (6, 1); expected (6,)"),
        ("gemm_dglu", {"dbias": torch.ones(N)}, "dbias has shape (64,); expected (128,)"),
        ("gemm_dglu", {"granularity": 96}, "preactivation has columns = 128; pairs of 96 columns"),
        ("gemm_recompute_dglu", {"upstream": matrix()}, "has shape (6, 64); expected (6, 32)"),
        ("gemm_recompute_dactivation", {"upstream": None}, "upstream is None; expected a tensor"),
        ("gemm_dactivation", {"activation": None}, "activation is None; expected one of relu"),
        ("gemm_rope", {"head_dim": 24}, "B has N = 64; heads of 24 columns need a multiple"),
        ("gemm_rope", {"width": 7}, "width is 7 and start 0; expected an even width that fits"),
        ("gemm_rope", {"start": 4}, "cos has shape (6, 8); expected (6, 6)"),
        ("gemm_rope", {"start": 4, "width": 16}, "width is 16 and start 4"),
        ("gemm_rope", {"style": "full"}, "style is 'full'; expected one of half, interleaved"),
        (
            "gemm_rope",
            {"heads": 5},
            "heads is 5; expected 1 to 4, the heads of 16 columns in N = 64",
        ),
        ("gemm_rope", {"heads": 0}, "heads is 0; expected 1 to 4"),
        ("gemm_rope", {"heads": 2.0}, "heads is 2.0; expected a whole number of heads"),
        ("gemm_rope", {"sin": None}, "sin is None; expected a tensor (6, 8)"),
        ("gemm_quantize", {"mode": "column"}, "mode is 'column'; expected one of tensor, row, mx"),
        (
            "gemm_quantize",
            {"out": matrix()},
            "out's type is 'float32'; expected one of float8_e4m3",
        ),
        ("gemm_quantize", {"scale": None}, "scale is None; it is read if mode is 'tensor'"),
        ("gemm_quantize", {"scale": torch.ones(N)}, "scale has shape (64,); expected one number"),
        ("gemm_quantize", {"scale": 0.0}, "scale is 0.0; expected a finite number above 0"),
        ("gemm_quantize", {"scale": -1}, "scale is -1; expected a finite number above 0"),
        ("gemm_quantize", {"mode": "row", "scale": torch.ones(N)}, "scale has shape (64,)"),
        (
            "gemm_quantize",
            {"mode": "row", "scale": torch.ones(M).half()},
            "scale is float16; expected float32",
        ),
        ("gemm_quantize", {"mode": "mx", "scale": torch.ones(M, 2)}, "expected float8_e8m0fnu"),
        ("gemm_quantize", {"mode": "mx", "scale": torch.ones(M)}, "(6,); expected (6, 2)"),
        ("gemm_dropout", {"p": torch.ones(M, N)}, "p has shape (6, 64); expected one number"),
        ("gemm_dropout", {"p": 1.5}, "p is 1.5; expected a probability from 0 to 1"),
        ("gemm_dropout", {"seed": 0.5}, "seed is 0.5; expected a whole number, or a tensor () of"),
        ("gemm_dropout", {"seed": None}, "seed is None; expected a whole number, or a tensor ()"),
        (
            "gemm_dropout",
            {"offset": 2**64},
            "offset is beyond all whole numbers of 64 bits",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_with_both_values(name, changes, message):
    with pytest.raises(ArgumentError, match=re.escape(message)):
        made(name, **changes)


def test_mx_blocks_divide_the_columns():
    A, B, out = gemm_tensors(M, 48, K)
    with pytest.raises(ArgumentError, match="B has N = 48; blocks of 32 columns need a multiple"):
        ka.fusions.gemm_quantize(
            A, B, out=out.to(E4M3), scale=torch.empty(M, 2, dtype=E8M0), mode="mx"
        )


def test_what_only_the_epilogue_knows_is_its_error():
    with pytest.raises(EpilogueError, match="seed"):
        made("gemm_dropout", seed=torch.ones(3, dtype=torch.int64))


@pytest.mark.parametrize("name", CASES)
def test_contradicting_factors_of_the_product_are_refused(name):
    A, B, out = gemm_tensors(M, N, K)
    given = {"out": out, **CASES[name]}
    with pytest.raises(ArgumentError, match="A has K = 16 but B has K = 15"):
        getattr(ka.fusions, name)(A, B[1:], **given)
    with pytest.raises(ArgumentError, match="A has rank 1"):
        getattr(ka.fusions, name)(A[0], B, **given)


def test_outputs_may_not_share_memory_with_what_is_read():
    C = torch.ones(M + 1, N)
    with pytest.raises(ArgumentError, match="out shares memory with C"):
        made("gemm_residual", C=C[:M], out=C[1:])
