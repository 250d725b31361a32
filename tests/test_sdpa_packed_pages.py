"""Packed queries of keys in pages, as a batch has that decodes and reads prompts together: what is
refused, what the reference computes, and calls."""

import itertools
import math

import pytest
import torch
from support.sdpa import NAN, SDPA, Draw, attention, run
from support.sdpa_fp8 import pages_of
from torch.testing import assert_close

import kernel_api as ka
from kernel_api import _attention_launches, masks
from kernel_api.arguments import Dropout
from kernel_api.errors import ArgumentError

#: Of each sequence; one has no query, one no key, and one fewer keys than queries.
QUERIES, KEYS = [1, 4, 0, 3, 2, 4], [10, 6, 5, 0, 7, 2]
PAGE, MOST_KEYS, ROWS = 3, 12, sum(QUERIES) + 3
STATISTICS = ("lse", "score_max", "score_sum_exp")


def draw(**how):
    return Draw(B=len(QUERIES), S_kv=MOST_KEYS, **how)


def operands(draw):
    """Rows behind the last sequence, keys behind a length and a page of nobody are NaN."""
    ends = torch.tensor([0, *QUERIES]).cumsum(0).int()
    q = torch.full((ROWS, draw.H, draw.D), NAN, dtype=draw.element)
    q[: ends[-1]] = draw.random(int(ends[-1]), draw.H, draw.D)
    told = {"cu_seqlens_q": ends, "max_seqlen_q": max(QUERIES)}
    return {"Q": q, **pages_of(draw, KEYS, PAGE), **told}


def arguments(draw, **options):
    out = torch.empty(ROWS, draw.H, draw.D_v, dtype=draw.element)
    found = {name: torch.empty(draw.H, ROWS, dtype=draw.wide) for name in STATISTICS}
    return SDPA(**{**operands(draw), "out": out, **found, **options})


def spans():
    """The rows of each sequence that has some: (b, first, end)."""
    ends = itertools.pairwise([0, *itertools.accumulate(QUERIES)])
    return [(b, first, end) for b, (first, end) in enumerate(ends) if first < end]


def alone(args, b, first, end, **options):
    """One of the sequences, whose queries are not packed."""
    found = {name: torch.empty_like(args.lse.tensor[None, :, first:end]) for name in STATISTICS}
    q, out = (one.tensor[first:end].transpose(0, 1)[None] for one in (args.Q, args.out))
    whole = {name: getattr(args, name).tensor for name in "KV"}
    own = {n: getattr(args, n).tensor[b : b + 1] for n in ("page_table", "seq_lens_kv")}
    return SDPA(**{**found, "Q": q, "out": torch.empty_like(out), **whole, **own, **options})


def assert_each_sequence(args, options_of):
    """All that is written is what each sequence alone gives, and nothing behind the last one."""
    found = run(args)
    for b, first, end in spans():
        expected = run(alone(args, b, first, end, **options_of(b)))
        assert_close(found["out"][first:end].transpose(0, 1), expected["out"][0])
        for name in STATISTICS:
            assert_close(found[name][:, first:end], expected[name][0])
    behind = sum(QUERIES)
    assert found["out"][behind:].eq(0).all()
    for name, nothing in zip(STATISTICS, (-math.inf, -math.inf, 0.0), strict=True):
        assert found[name][:, behind:].eq(nothing).all()
    assert not any(one.isnan().any() for one in found.values())


# Refused ---------------------------------------------------------------------------------


def i(*shape):
    return torch.zeros(shape, dtype=torch.int32)


def x(*shape):
    return torch.zeros(shape, dtype=torch.float64)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cu_seqlens_kv": i(7)}, "cu_seqlens_kv and page_table are given; the lengths of keys in "
         "pages are told by seq_lens_kv: leave cu_seqlens_kv out"),
        ({"page_table": None}, "cu_seqlens_q is given and cu_seqlens_kv is None; packed sequences "
         r"need both, unless keys are in pages \(page_table\)"),
        ({"max_seqlen_kv": 12}, "max_seqlen_kv is 12 and page_table is given; page_table and "
         "seq_lens_kv say how many keys there are: leave it out"),
        ({"max_seqlen_q": None}, "max_seqlen_q is None; packed sequences need the length of the"),
        ({"seq_lens_q": i(6)}, "seq_lens_q and cu_seqlens are given; packed sequences are as long"),
        ({"seq_lens_kv": None}, "page_table is given and seq_lens_kv is None; pages hold whole s"),
        ({"bias": x(4, 12)}, "bias and cu_seqlens are given; a bias .* add it in score_mod"),
        ({"mask": masks.Padding()}, r"the mask has Padding\(\) and seq_lens_q is None; it needs "
         "seq_lens_q and seq_lens_kv; cu_seqlens_q and seq_lens_kv alone say it of packed queries"),
        ({"Q": x(6, 4, 4, 8)}, r"Q has shape \(6, 4, 4, 8\); expected \(T, H, D\)$"),
        ({"K": x(9, 2, 8)}, r"K has shape \(9, 2, 8\); expected \(pages, H_kv, page_size, D\)$"),
        ({"V": x(8, 2, 3, 16)}, "K has pages = 25 but V has pages = 8"),
        ({"V": x(25, 2, 4, 16)}, "K has page_size = 3 but V has page_size = 4"),
        ({"page_table": i(5, 4)}, r"page_table has .*; expected \(B, max_pages\) with B = 6"),
        ({"seq_lens_kv": i(7)}, r"seq_lens_kv has shape \(7,\); expected \(B,\) = \(6,\)"),
        ({"cu_seqlens_q": i(0)}, r"cu_seqlens_q is empty; expected \(B \+ 1,\), from 0 to the la"),
        ({"cu_seqlens_q": i()}, r"cu_seqlens_q has shape \(\); expected \(B \+ 1,\)"),
        ({"lse": x(17, 4)}, r"lse has shape \(17, 4\); expected \(H, T\) = \(4, 17\)"),
        ({"descale_k": torch.ones(())}, "descale_k is given and K is float64; it is for 8-bit flo"),
    ],
)  # fmt: skip
def test_what_does_not_fit_the_form_is_refused(options, words):
    with pytest.raises(ArgumentError, match=words):
        arguments(draw(), **options)


# What the reference computes -------------------------------------------------------------

TABLE = torch.rand(1, 4, 2, 4, generator=torch.Generator().manual_seed(1)) < 0.6
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.float64)
OPTIONS = {
    "plain": {},
    "causal": {"mask": masks.Causal()},
    "causal, bottom right": {"mask": masks.Causal("bottom_right")},
    "window": {"mask": masks.SlidingWindow(2, 1)},
    "window, bottom right": {"mask": masks.SlidingWindow(3, 0, "bottom_right"), "sink": SLOPES},
    "function": {"mask": masks.MaskMod(lambda b, h, q, kv: (kv + q) % 3 != h)},
    "softcap": {"softcap": 0.5, "scale": -0.7},
    "alibi": {"alibi": SLOPES, "mask": masks.Causal("bottom_right")},
    "score": {"score_mod": lambda s, b, h, q, kv, t: s * t[h] - 0.2 * (kv - q),
              "score_operands": {"t": SLOPES}},
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_a_batch_gives_what_each_sequence_alone_does(name):
    assert_each_sequence(arguments(draw(), **OPTIONS[name]), lambda b: OPTIONS[name])


def test_zeros_of_dropout_are_by_the_number_of_the_sequence():
    seed, offset = 2**40 + 5, 2**32 - 3
    args = arguments(draw(), dropout=Dropout(0.4, seed, offset))
    assert_each_sequence(args, lambda b: {"dropout": Dropout(0.4, seed, offset + 4 * b)})


def test_a_table_of_blocks_is_of_the_longest_sequence():
    args = arguments(draw(), mask=masks.BlockSparse(TABLE, (2, PAGE)))

    def of_one(b):
        blocks = TABLE[:, :, : -(-QUERIES[b] // 2)]
        return {"mask": masks.BlockSparse(blocks, (2, PAGE))}

    assert_each_sequence(args, of_one)


def test_the_last_query_stands_at_the_last_key_of_its_pages():
    args = arguments(draw(), mask=masks.Causal("bottom_right"), sink=SLOPES)
    found = run(args)
    for b, first, end in spans():
        beyond = KEYS[b] - QUERIES[b]

        def seen(_, h, i, j, beyond=beyond):
            return j <= i + beyond

        pages = args.page_table.tensor[b, : -(-KEYS[b] // PAGE)].long()
        q = args.Q.tensor[first:end].transpose(0, 1)[None]
        k, v = (one.tensor[pages].transpose(0, 1).flatten(1, 2)[None] for one in (args.K, args.V))
        out, lse = attention(q, k, v, visible=seen, sink=SLOPES, lens_kv=KEYS[b : b + 1])
        assert_close(found["out"][first:end].transpose(0, 1), out[0])
        assert_close(found["lse"][:, first:end], lse[0])


@pytest.mark.parametrize("queries", [torch.bfloat16, torch.float8_e4m3fn])
def test_pages_of_8_bits_have_the_scales_of_their_sequence(queries):
    of_keys = draw(D=16, element="float8_e4m3fn")
    given = {**operands(of_keys), "out": torch.empty(ROWS, 4, 16, dtype=torch.bfloat16)}
    given["Q"] = given["Q"].to(queries)
    scales = {name: of_keys.wides(6, 2).abs() + 0.5 for name in ("descale_k", "descale_v")}
    args = arguments(of_keys, **given, **scales)
    assert_each_sequence(args, lambda b: {name: one[b : b + 1] for name, one in scales.items()})


def test_values_may_be_the_first_columns_of_keys_in_pages():
    args = arguments(draw(D=24), values_in_keys=True)
    assert args.V.address == args.K.address
    assert args.D_v == 16
    assert_each_sequence(args, lambda b: {})


@pytest.mark.parametrize("element", ["float32", "bfloat16"])
def test_the_reference_verifies(element):
    args = arguments(draw(element=element, D=16), mask=masks.Causal("bottom_right"))
    (kernel,) = ka.get_kernels(args, providers=["reference"])
    assert ka.verify(kernel, args)


def test_a_sequence_is_no_longer_than_is_said_and_its_pages_are_there():
    given = operands(draw())
    Q, K, V = (given.pop(name) for name in "QKV")
    with pytest.raises(ArgumentError, match="sequence 1 has 4 tokens by cu_seqlens_q, and max_se"):
        ka.ops.sdpa(Q, K, V, **{**given, "max_seqlen_q": 3})
    given["page_table"][2, 1] = -1  # of which no query reads
    ka.ops.sdpa(Q, K, V, **given)
    given["page_table"][1, 1] = -1
    with pytest.raises(ArgumentError, match=r"page_table\[1, 1\] is -1, and 6 keys are there"):
        ka.ops.sdpa(Q, K, V, **given)


# Calls -----------------------------------------------------------------------------------


@pytest.fixture
def given():
    return operands(draw())


def split(given):
    return [given[name] for name in "QKV"], {n: one for n, one in given.items() if n not in "QKV"}


@pytest.mark.parametrize("provided", ["reference", "all"])
def test_one_call_allocates_out_and_statistics(given, provided, monkeypatch):
    if provided == "reference":
        monkeypatch.setenv("KERNEL_API_PROVIDERS", "reference")
    (Q, K, V), told = split(given)
    expected = run(arguments(draw(), **given, mask=masks.Causal("bottom_right")))
    told["mask"] = masks.Causal("bottom_right")
    found = ka.ops.sdpa(Q, K, V, return_statistics=True, **told)
    for name in ("out", *STATISTICS):
        assert_close(getattr(found, name), expected[name])
    out = torch.full_like(found.out, NAN)
    assert ka.nn.attention(Q, K, V, **told).equal(ka.ops.sdpa(Q, K, V, out=out, **told))


def test_lengths_and_pages_are_new_in_a_call_that_looks_like_an_earlier_one(given, monkeypatch):
    monkeypatch.setenv("KERNEL_API_PROVIDERS", "reference")
    (Q, K, V), told = split(given)
    for _ in range(2):  # the first one may load providers
        ka.ops.sdpa(Q, K, V, return_lse=True, **told)
    monkeypatch.setattr(_attention_launches, "_first", None)
    told["seq_lens_kv"].copy_(torch.tensor([3, 2, 1, 0, 6, 1]))
    told["page_table"][4, :2] = told["page_table"][4, :2].flip(0)
    told["cu_seqlens_q"].copy_(torch.tensor([0, 2, 2, 5, 9, 10, 14]))
    found = ka.ops.sdpa(Q, K, V, return_lse=True, **told)
    monkeypatch.undo()
    expected = run(arguments(draw(), **given))
    assert_close(found.out, expected["out"])
    assert_close(found.lse, expected["lse"])


@pytest.mark.parametrize("compiled", [False, True])
def test_pages_have_no_gradient(given, compiled):
    (Q, K, V), told = split(given)
    call = ka.ops.sdpa
    if compiled:
        torch._dynamo.reset()
        call = torch.compile(ka.ops.sdpa, backend="aot_eager", fullgraph=True)
    out = call(Q.requires_grad_(), K, V, **told)
    with pytest.raises(ArgumentError, match="pages and 8-bit operands have no gradient"):
        out.sum().backward()


def test_torch_compiles_a_call_in_one_graph(given):
    from kernel_api import _attention_operators as operators

    (Q, K, V), told = split(given)

    def function(Q, K, V, told):
        mask = masks.Causal("bottom_right")
        out, lse = ka.ops.sdpa(2 * Q, K, V, mask=mask, return_lse=True, **told)
        return out + 1, lse

    torch._dynamo.reset()
    expected = function(Q, K, V, told)
    found = torch.compile(function, backend="aot_eager", fullgraph=True)(Q, K, V, told)
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other)
    call = (Q.nan_to_num(), K, V, *operators._packed(told))
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(operators._operator, call, test_utils=checks)


# What Hopper offers ----------------------------------------------------------------------


def on_hopper(T=300, B=5, heads=(32, 8), D=128, most=200, pages=64, page=64):
    """On no device; 16 bits."""

    def i(*shape):
        return torch.empty(shape, dtype=torch.int32, device="meta")

    def b(*shape):
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    H, H_kv = heads
    K = b(pages, H_kv, page, D)
    told = {"cu_seqlens_q": i(B + 1), "max_seqlen_q": most, "seq_lens_kv": i(B)}
    return SDPA(b(T, H, D), K, K, b(T, H, D), page_table=i(B, pages), **told)


def families(args):
    found = ka.get_kernels(args, cc=90, providers=["cutedsl"])
    return list(dict.fromkeys(kernel.family for kernel in found))


def test_sequences_that_decode_and_chunks_of_prompts_have_kernels_for_few_and_for_many_queries():
    few, many, any_gpu = "sm90.sdpa_decode", "sm90.sdpa_forward", "sm80.sdpa_forward"
    assert families(on_hopper()) == [few, many, any_gpu]
    assert families(on_hopper(page=24)) == [any_gpu]
    args = on_hopper(T=9000, most=5000)
    assert families(args) == [many, any_gpu]
    reasons = str(ka.explain(args, cc=90))
    assert (
        "queries of all heads that share one of keys are 16384 at most; they are 20000" in reasons
    )


def test_places_and_blocks_are_counted_in_32_bits():
    for args, words in (
        (on_hopper(T=2**29, most=2), "are counted in 32 bits, 2³⁰ at most; they are 2147483648"),
        (on_hopper(T=2**22, most=2, pages=2**13), "2⁴² pairs with keys at most"),
    ):
        assert "sm90.sdpa_decode" not in families(args)
        assert words in str(ka.explain(args, cc=90))


def test_workspaces_have_room_for_what_all_sequences_may_have_to_do():
    def size(**how):
        args = on_hopper(**how)
        (kernel, *_) = (k for k in ka.get_kernels(args, cc=90) if k.family == "sm90.sdpa_decode")
        return kernel.get_workspace_size(args)

    tile, entry = 64, 16  # rows, and bytes
    assert size(T=300 + 16 * tile) - size() == 4 * 16 * 8 * entry  # 4 heads of 16 tiles more
    assert size(B=15) - size() == 10 * 8 * entry
