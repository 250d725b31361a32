"""Attention by torch: what is offered where, why it is not elsewhere, and that it is right."""

import pytest
import torch
from support.sdpa import BACKWARD, Draw, arguments_for, backward_of, run

import kernel_api as ka
from kernel_api import epilogue as ep
from kernel_api import masks
from kernel_api.arguments import Dropout
from kernel_api.tuning._choice import Choice
from kernel_api.verification import conduct, judge

FORWARD = ("cudnn", "flash", "efficient")

ZEROS = torch.zeros(1, 1, 64, 64)

MASKS = {
    "none": None,
    "causal": masks.Causal(),
    "bottom right": masks.Causal("bottom_right"),
}


def families(args, provider="torch"):
    return {k.family_name() for k in ka.get_kernels(args, cc=90, providers=[provider])}


def refusal(args, family):
    (one,) = [r for r in ka.explain(args, cc=90).rejected if r.family == f"torch.{family}"]
    return one.reason


def on_meta(**options):
    """Arguments of a GPU's, or another's: the rules of devices agree with all."""
    how = {
        n: options.pop(n) for n in ("S_q", "S_kv", "D", "D_v", "H_kv", "element") if n in options
    }
    given = {"S_q": 64, "S_kv": 64, "D": 64, "D_v": 64, "H_kv": 4, "element": "bfloat16", **how}
    made = Draw(**given).arguments(**options)
    return ka.SdpaArguments(*(o.tensor.to("meta") for o in made.operands), **{
        n: getattr(o, "tensor", o).to("meta") if hasattr(o, "shape") else o
        for n, o in made._keywords().items()
    })  # fmt: skip


# On the CPU ------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("H_kv", [4, 2])
@pytest.mark.parametrize(("S_q", "S_kv"), [(40, 40), (33, 65)])
def test_what_runs_on_the_cpu_is_right(mask, H_kv, S_q, S_kv):
    found = set()
    for element in ("float64", "bfloat16"):
        draw = Draw(H_kv=H_kv, S_q=S_q, S_kv=S_kv, D=16, D_v=16, element=element)
        for lse in (draw.lse(), None):
            args = draw.arguments(mask=MASKS[mask], lse=lse)
            for kernel in ka.get_kernels(args, providers=["torch"]):
                assert ka.verify(kernel, args), kernel
                found.add(kernel.family_name())
        args = draw.arguments(mask=MASKS[mask])
        run(args)
        backward = backward_of(args, draw.results())
        for kernel in ka.get_kernels(backward, providers=["torch"]):
            assert ka.verify(kernel, backward), kernel
            found.add(kernel.family_name())
    offered = mask != "bottom right" or S_q == S_kv
    assert ("torch.sdpa_math" in found) == offered
    same_heads = {"torch.sdpa_flash_cpu", "torch.sdpa_flash_cpu_backward"}
    assert (same_heads <= found) == (offered and H_kv == 4)


@pytest.mark.parametrize("shape", [(2, 4, 24, 40), (1, 1, 24, 40), (2, 1, 1, 40)])
@pytest.mark.parametrize(
    ("element", "hidden"),
    [
        ("float32", -torch.inf),
        ("float64", -torch.inf),
        ("bfloat16", -torch.inf),
        ("float32", -1e9),
        ("bfloat16", torch.finfo(torch.bfloat16).min),
    ],
)
def test_a_bias_may_hide_every_key(element, hidden, shape):
    draw = Draw(H_kv=4, S_q=24, S_kv=40, D=16, D_v=16, element=element)
    bias = draw.random(*shape)
    bias[-1, 0, -1] = hidden
    args = draw.arguments(bias=bias)
    for one in (args, draw.arguments(bias=bias, lse=None)):
        for kernel in ka.get_kernels(one, providers=["torch"]):
            assert ka.verify(kernel, one), kernel
    run(args)
    assert args.lse.tensor[-1, 0, -1].eq(-torch.inf).all()
    backward = backward_of(args, draw.results())
    (kernel,) = ka.get_kernels(backward, providers=["torch"])
    assert ka.verify(kernel, backward)
    leaves = [one.tensor.clone().requires_grad_() for one in (args.Q, args.K, args.V)]
    ka.ops.sdpa(*leaves, bias=bias).sum().backward()
    assert all(leaf.grad.isfinite().all() for leaf in leaves)


@pytest.mark.parametrize("shape", [(2, 4, 24, 40), (1, 1, 24, 40), (2, 1, 1, 40)])
def test_a_bias_is_added(shape):
    draw = Draw(H_kv=4, S_q=24, S_kv=40, D=16, D_v=16, element="float32")
    args = draw.arguments(bias=draw.random(*shape))
    kernels = ka.get_kernels(args, providers=["torch"])
    assert [k.family_name() for k in kernels] == ["torch.sdpa_flash_cpu"]
    assert ka.verify(kernels[0], args)
    run(args)
    backward = backward_of(args, draw.results())
    (kernel,) = ka.get_kernels(backward, providers=["torch"])
    assert ka.verify(kernel, backward)


@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_a_causal_mask_with_a_scale_that_is_not_positive_is_refused_or_right(scale):
    draw = Draw(H_kv=4, S_q=37, S_kv=37, D=16, D_v=16, element="float32")
    args = draw.arguments(mask=masks.Causal(), scale=scale)
    kernels = ka.get_kernels(args, providers=["torch"])
    assert all(ka.verify(kernel, args) for kernel in kernels)
    assert "unless the scale is positive; it is not" in refusal(args, "sdpa_flash_cpu")
    assert "torch.sdpa_flash_cpu" in families(draw.arguments(scale=scale))


# On a GPU --------------------------------------------------------------------------------


def test_the_three_backends_take_plain_and_causal_attention():
    names = {f"torch.sdpa_{name}" for name in FORWARD}
    for mask in (None, masks.Causal()):
        args = on_meta(mask=mask)
        assert names <= families(args)
        tensors = [torch.empty_like(o.tensor) for o in (args.Q, args.K, args.V)]
        operands = (*args.tensors, args.out.tensor.clone(), args.lse.tensor, *tensors)
        backward = BACKWARD(*operands, mask=mask)
        assert {f"{name}_backward" for name in names} <= families(backward)


@pytest.mark.parametrize(
    ("options", "refused", "words"),
    [
        ({"mask": masks.SlidingWindow(4, 0)}, FORWARD, "torch's operators mask nothing, or"),
        ({"mask": masks.Causal("bottom_right"), "S_kv": 128}, FORWARD, "the mask is Causal"),
        ({"mask": masks.Causal(), "S_kv": 128}, ("flash",), "as many keys as queries; they are"),
        ({"softcap": 30.0}, FORWARD, "no softcap, score_mod, alibi or sink; softcap is given"),
        ({"sink": torch.zeros(4)}, FORWARD, "sink is given"),
        ({"alibi": torch.zeros(4)}, FORWARD, "alibi is given"),
        ({"score_mod": lambda s, b, h, q, kv: s * 2}, FORWARD, "score_mod is given"),
        ({"dropout": Dropout(0.1, 0, 0)}, FORWARD, "torch draws the zeros of dropout in a way of"),
        ({"seq_lens_kv": torch.ones(2).int()}, FORWARD, "of one length; they have seq_lens"),
        ({"D_v": 32}, ("flash",), "has values as long as keys; they have 32 and 64"),
        ({"H_kv": 2}, ("efficient",), "has as many heads of keys as of queries; they are 2 and 4"),
        ({"D": 512, "D_v": 512}, ("cudnn", "flash"), "256 on Hopper"),
        ({"S_q": 1}, ("cudnn",), "more than one query and one key; they are 1 and 64"),
        ({"bias": ZEROS.bfloat16()}, ("flash",), "flash attention takes no bias"),
        ({"bias": ZEROS}, FORWARD, "bias is float32"),
        ({"bias": ZEROS[..., :1].bfloat16()}, ("efficient", "flash"), "in vectors of 16 elements"),
        ({"bias": ZEROS.bfloat16(), "mask": masks.Causal()}, ("cudnn", "flash"),
         "a bias or a causal mask, not both"),
        ({"element": "float32"}, ("cudnn", "flash"), "Q is float32; expected float16 or bfloat16"),
        ({"S_kv": 0}, FORWARD, "torch's operators need a key"),
    ],
)  # fmt: skip
def test_what_a_backend_lacks_is_told(options, refused, words):
    args = on_meta(**options)
    offered = families(args)
    for name in FORWARD:
        assert (f"torch.sdpa_{name}" in offered) == (name not in refused)
    assert words in refusal(args, f"sdpa_{refused[0]}")


@pytest.mark.parametrize("name", ["Q", "K", "V", "out", "dO"])
def test_what_is_read_lies_at_multiples_of_16_bytes(name):
    args = on_meta()
    tensors = dict(zip(args.operand_names, args.tensors, strict=True))
    gradients = {f"d{n}": tensors[n].clone() for n in "QKV"}
    whole = {**tensors, "lse": args.lse.tensor, "dO": tensors["out"].clone(), **gradients}
    apart = {**whole, name: torch.empty(2, 4, 64, 65, device="meta").bfloat16()[..., 1:]}
    forward = ka.SdpaArguments(*(apart[n] for n in ("Q", "K", "V", "out", "lse")))
    if name in "QKV":
        assert families(forward) == {"torch.flex_attention"}
        assert f"{name}'s address and strides" in refusal(forward, "sdpa_flash")
    assert families(BACKWARD(**whole)) and not families(BACKWARD(**apart))


def test_gradients_that_torch_does_not_give_are_told():
    args = on_meta(bias=torch.zeros(1, 1, 64, 64).bfloat16())
    given = [torch.empty_like(o.tensor) for o in (args.Q, args.K, args.V)]
    operands = (*args.tensors, args.out.tensor.clone(), args.lse.tensor, *given)
    bias = args.bias.tensor
    sums = BACKWARD(*operands, bias=bias, dBias=bias.clone())
    assert "gives no gradient of a bias" in refusal(sums, "sdpa_cudnn_backward")
    assert "that is not broadcast; its shape is" in refusal(sums, "sdpa_efficient_backward")
    same = BACKWARD(*operands, bias=bias, deterministic=True)
    for name in FORWARD:
        words = "flash attention takes no bias" if name == "flash" else "adds gradients up in any"
        assert words in refusal(same, f"sdpa_{name}_backward")


@pytest.mark.parametrize(
    "family", [f"torch.sdpa_{n}{b}" for n in FORWARD for b in ("", "_backward")]
)
def test_operators_of_a_gpu_are_called_as_their_schemas_say(family):
    """On meta tensors: they give shapes alone."""
    kernels = ka.get_kernels(metadata_filter=lambda m: m.kernel_class.family == family)
    kernel = next(k for k in kernels if k.metadata.operands.Q.dtype == torch.bfloat16)
    args = arguments_for(kernel, 48, 64, 2, device="meta")
    if not family.endswith("backward"):
        args = args.rebuilt(*args.tensors, torch.empty(2, 2, 48, device="meta"))
    found = kernel._computed(args)
    for name, output in args.outputs.items():
        assert tuple(found[name].shape) == output.shape
        assert found[name].dtype is output.tensor.dtype


def test_packed_and_paged_sequences_are_not_torchs():
    i = torch.zeros(3, dtype=torch.int32)
    x = torch.zeros(8, 4, 64).half()
    args = ka.SdpaArguments(
        x, x, x, x.clone(), cu_seqlens_q=i, cu_seqlens_kv=i, max_seqlen_q=4, max_seqlen_kv=4
    )
    assert "they are packed" in refusal(args, "sdpa_math")
    pages = torch.zeros(3, 4, 16, 64).half()
    told = {"cu_seqlens_q": i, "max_seqlen_q": 4, "page_table": i[:2].view(2, 1)}
    args = ka.SdpaArguments(x, pages, pages, x.clone(), seq_lens_kv=i[:2], **told)
    for family in ("sdpa_math", "sdpa_flash_cpu"):
        assert "they are packed" in refusal(args, family)


# flex_attention --------------------------------------------------------------------------


def bent(score, b, h, q, kv, table, gain):
    near = ep.minimum(ep.abs(kv - q), 3)
    tilted = ep.where((q // 4 == kv % 3) & ~(kv < 2), score * gain, ep.tanh(score) + ep.exp(0.5))
    return tilted + table[h, near] - 0.01 * near


FLEX = {
    "plain": {},
    "bias": {"bias": torch.linspace(-1, 1, 24).view(1, 1, 1, 24)},
    "one bias": {"bias": torch.full((1, 1, 1, 1), 0.3)},
    "biases": {"bias": torch.linspace(-1, 1, 2 * 4 * 16 * 24).view(2, 4, 16, 24)},
    "hidden rows": {"bias": -1e9 * (torch.arange(16) % 3 == 0).view(1, 1, 16, 1)},
    "hidden by a function": {
        "score_mod": lambda score, b, h, q, kv: ep.where(q % 3 == 0, -1e9, score)
    },
    "softcap": {"softcap": 1.5, "alibi": torch.linspace(0, 1, 4)},
    "score": {
        "score_mod": bent,
        "score_operands": {"table": torch.linspace(-1, 2, 16).view(4, 4), "gain": 1.5},
        "mask": masks.SlidingWindow(3, 5) & masks.SlidingWindow(20, 2, "bottom_right"),
    },
    "mask": {
        "mask": masks.MaskMod(lambda b, h, q, kv, ids: ids[q] == ids[kv], ids=torch.arange(24) // 7)
        & masks.BlockSparse(torch.tensor([[[[1, 1], [1, 0]]]]).bool(), (8, 16))
    },
    "full blocks": {
        "mask": masks.with_blocks(
            masks.MaskMod(lambda b, h, q, kv, ids: ids[q] == ids[kv], ids=torch.arange(24) // 7),
            16,
            24,
            block_shape=(4, 7),
        )
    },
}


@pytest.mark.parametrize("name", FLEX)
@pytest.mark.filterwarnings("ignore")
def test_flex_attention_is_given_the_same_functions(name):
    from kernel_api.providers.torch.sdpa_flex import computed

    draw = Draw(S_q=16, S_kv=24, D=16, D_v=16, element="float32")
    args = draw.arguments(**FLEX[name])

    def attend():
        with torch.no_grad():
            for output, values in computed(args, compiled=False).items():
                args.outputs[output].tensor.copy_(values)

    assert conduct(args, attend) is None
    verdict = judge(args)
    assert verdict, verdict


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sink": torch.zeros(4)}, "no dropout and no sink"),
        ({"dropout": Dropout(0.1, 0, 0)}, "no dropout and no sink"),
        ({"seq_lens_kv": torch.ones(2).int()}, "dense sequences of one length"),
        ({"score_mod": lambda s, b, h, q, kv: ep.cast(s, "f16")}, "no function that casts"),
        ({"score_mod": lambda s, b, h, q, kv: s + ep.minimum(7, 9)}, "not between constants"),
        ({"score_mod": lambda s, b, h, q, kv: s + q * 2**33}, f"64; {2**33} is beyond them"),
        ({"score_mod": lambda s, b, h, q, kv: s + q // 2**31}, f"64; {2**31} is beyond them"),
        ({"D": 8}, "heads have 16 elements or more; they have 8 and 64"),
    ],
)
def test_what_flex_attention_lacks_is_told(options, words):
    assert words in refusal(on_meta(**options), "flex_attention")


def test_flex_attention_takes_every_function_of_scores():
    assert "torch.flex_attention" in families(on_meta(score_mod=lambda s, b, h, q, kv: s - q))
    assert "torch.flex_attention" in families(on_meta(mask=masks.SlidingWindow(8, 0), softcap=5.0))


def test_what_compiles_as_it_runs_competes_where_it_is_asked_for():
    """torch's flex_attention takes more than 10 s for each new size."""

    def heads(count, S):
        shape = 1, count, S, 128
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    Q, K = heads(32, 64), heads(8, 1024)
    args = ka.SdpaArguments(Q, K, K.clone(), Q.clone(), mask=masks.Causal("bottom_right"))

    def competes(**asked):
        kernels = Choice(cc=90, **asked).candidates(args, "cuda").kernels
        return "torch.flex_attention" in {kernel.family for kernel in kernels}

    assert competes(providers=["cutedsl", "torch"]) and not competes()
    assert competes(metadata_filter=lambda metadata: "flex" in metadata.kernel_name)
