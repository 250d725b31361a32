"""What the attention families for Ampere offer: queries, rules, metadata, compiled code."""

import pytest
import torch
from support.kernels import EVERY_KERNEL
from support.sass import sass
from support.sdpa import BACKWARD, Draw

import kernel_api as ka
from kernel_api import epilogue as ep
from kernel_api import masks, provider
from kernel_api.arguments import Dropout

(CUTEDSL,) = provider.providers(["cutedsl"])
NAMES = ("sm80.sdpa_forward", "sm80.sdpa_backward")
FAMILIES = {f.family: f for f in CUTEDSL.families() if f.family in NAMES}
ROOMS = ((64, 64), (128, 128), (192, 128), (192, 192), (256, 256))
#: A head of every room, by what is asked.
HEADS = {(8, 64): 0, (40, 72): 1, (128, 128): 1, (192, 128): 2, (136, 136): 3, (64, 200): 4}

both = pytest.mark.parametrize("name", NAMES)
#: What a multiprocessor of the smallest of these GPUs gives a block.
MOST_SHARED_MEMORY = 99 * 1024
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu


def meta(name=NAMES[0], D=64, D_v=64, *, element="bfloat16", pad=0, B=2, S=512, **options):
    """Arguments of a family; pad: elements between rows."""
    draw = Draw(B, 4, 2, S, S, D, D_v, element=element, pad=pad, device="meta")
    given = {key: make(draw) if callable(make) else make for key, make in options.items()}
    if name == NAMES[0]:
        return draw.arguments(**given)
    read = draw.queries(), draw.keys(), draw.values(), draw.results(), draw.results(), draw.lse()
    return BACKWARD(*read, *(one.clone() for one in read[:3]), **given)


def offered(args, cc=80):
    kernels = ka.get_kernels(args, cc=cc, providers=["cutedsl"])
    return [kernel for kernel in kernels if kernel.family in NAMES]


def designs(args):
    return [kernel.metadata.design for kernel in offered(args)]


def refusal(args, name):
    (told,) = [r for r in ka.explain(args, cc=80).rejected if r.family == name]
    return told


# The query -------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("cc", [80, 86, 89, 90, 100, 120])
def test_every_gpu_from_ampere_on_is_served(name, cc):
    assert {kernel.family for kernel in offered(meta(name), cc)} == {name}


def packed(name, T, ends, longest):
    """T rows of queries and of keys, in sequences of up to `longest`."""
    draw = Draw(1, 4, 2, T, T, 64, 64, element="bfloat16", pad=0, device="meta")
    read = draw.queries(), draw.keys(), draw.values(), draw.results()
    rows = [one[0].transpose(0, 1) for one in read]
    starts = torch.empty(ends, dtype=torch.int32, device="meta")
    said = {"cu_seqlens_q": starts, "cu_seqlens_kv": starts}
    said |= {"max_seqlen_q": longest, "max_seqlen_kv": longest}
    if name == NAMES[0]:
        return ka.SdpaArguments(*rows, **said)
    gradients = (one.clone() for one in rows[:3])
    return BACKWARD(*rows, rows[3].clone(), draw.lse()[0], *gradients, **said)


@both
@pytest.mark.parametrize("ends, longest", [(1, 3), (3, 0)])
def test_rows_of_packed_tensors_without_a_sequence_are_refused(name, ends, longest):
    # Nobody would write zeros to them.
    assert offered(packed(name, 5, 3, 3)) and offered(packed(name, 5, 3, 3), 90)
    args = packed(name, 5, ends, longest)
    assert offered(args) == []
    assert (
        f"there are 5 rows, and {ends - 1} sequences of up to {longest}"
        in refusal(args, name).reason
    )


@both
def test_an_older_gpu_is_not(name):
    assert offered(meta(name), cc=75) == []


@both
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("element", ["float16", "bfloat16"])
def test_every_head_dimension_has_the_least_room_that_it_fits_in(name, heads, element):
    args = meta(name, *heads, element=element)
    assert {design.head_dim for design in designs(args)} == {ROOMS[HEADS[heads]]}


@both
def test_rows_that_begin_anywhere_are_copied_one_by_one(name):
    aligned, others = offered(meta(name)), offered(meta(name, pad=1))
    assert {kernel.metadata.operands.Q.alignment for kernel in others} == {2}
    assert aligned[0].metadata.operands.Q.alignment == 16
    assert aligned[0].predict(meta(name)) < others[0].predict(meta(name, pad=1))


@both
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"D": 264}, "the head dimensions have room; they are (264, 64)"),
        ({"S": 48, "scale": -1.0}, "scale is -1.0"),
        ({"element": "float32"}, "float32"),
        ({"bias": lambda d: d.random(1, 1, element=E4M3)}, "be of; bias is float8_e4m3fn"),
    ],
)
def test_what_is_refused_is_told(name, how, words):
    args = meta(name, **how)
    assert offered(args) == []
    assert words in refusal(args, name).reason


OPTIONS = {
    "softcap": 5.0,
    "bias": lambda d: d.random(1, 4, d.S_q, d.S_kv),
    "alibi": lambda d: d.wides(d.H),
    "dropout": Dropout(0.1, 1, 2),
    "score_mod": lambda d: lambda score, b, h, q, kv: 2 * score,
    "mask": lambda d: masks.BlockSparse(torch.ones(1, 1, 4, 4, dtype=torch.bool, device="meta")),
}


@both
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("D", [64, 128, 192, 256])
def test_every_option_is_served_by_designs_with_registers_left(name, option, D):
    plain, args = meta(name, D, D), meta(name, D, D, **{option: OPTIONS[option]})
    found = designs(args)
    assert found
    assert set(found) <= set(designs(plain))
    assert max(design.tile_shape[1] for design in found) <= 32


@pytest.mark.parametrize("name", ["bias", "dBias"])
def test_a_bias_of_powers_of_two_has_no_kernel_on_any_gpu(name):
    given = {"bias": lambda d: d.random(d.S_q, d.S_kv)}
    given["dBias"] = given[name] = lambda d: d.random(d.S_q, d.S_kv, element=E8M0)
    for one in NAMES[name == "dBias" :]:
        args = meta(one, **{n: make for n, make in given.items() if n == "bias" or one == NAMES[1]})
        for cc in (80, 90):
            assert not ka.get_kernels(args, cc=cc, providers=["cutedsl"])


@pytest.mark.parametrize(("cc", "in_hardware"), [(80, False), (86, False), (89, True), (90, True)])
def test_functions_convert_floats_of_8_bits_where_the_hardware_does_not(
    monkeypatch, cc, in_hardware
):
    from kernel_api.providers.cutedsl import compiler
    from kernel_api.providers.cutedsl.sdpa.scores import functions_of

    monkeypatch.setattr(compiler, "target_cc", lambda: cc)
    args = meta(score_mod=lambda d: lambda score, b, h, q, kv: score + ep.cast(kv, E4M3))
    assert functions_of(args).score._conversions.float8 is in_hardware


def test_short_and_long_sequences_have_their_tiles():
    long, short = designs(meta(S=4096, B=8)), designs(meta(S=16, B=1))
    assert long[0].tile_shape == (128, 64)
    assert short[0].tile_shape[0] == 64


def test_the_gradient_asks_for_two_numbers_of_each_query():
    args = meta(NAMES[1])
    assert offered(args)[0].get_workspace_size(args) == 65536 + 2 * 4 * 2 * 4 * 512
    forward = meta()
    assert offered(forward)[0].get_workspace_size(forward) == 0


# Compiled --------------------------------------------------------------------------------


def chosen():
    """Of every room and tile one; without KERNEL_API_TEST_EVERY_KERNEL, the best of two rooms."""
    found = {}
    for name, family in FAMILIES.items():
        for kernel in family.generate_kernels(lambda m: m.operands.Q.dtype == torch.bfloat16):
            design, alignment = kernel.metadata.design, kernel.metadata.operands.Q.alignment
            found[name, design, alignment] = kernel
    kernels = list(found.values())
    if EVERY_KERNEL:
        return kernels
    rooms = {NAMES[0]: (256, 256), NAMES[1]: (128, 128)}
    few = {kernel.family: kernel for kernel in reversed(kernels) if _is_best(kernel, rooms)}
    return list(few.values())


def _is_best(kernel, rooms):
    room = kernel.metadata.design.head_dim
    return room == rooms[kernel.family] and kernel.metadata.operands.Q.alignment == 16


@pytest.mark.compile
@pytest.mark.parametrize("kernel", chosen(), ids=lambda kernel: kernel.metadata.kernel_name)
def test_a_kernel_multiplies_by_tensor_cores_and_spills_nothing(kernel):
    D, D_v = kernel.metadata.design.head_dim
    pad = 0 if kernel.metadata.operands.Q.alignment == 16 else 1
    args = meta(kernel.family, D, D_v, pad=pad, mask=masks.Causal("bottom_right"))
    artifact = kernel.compile(args, cc=80)
    assert artifact.resources.spill_bytes == 0
    assert artifact.resources.threads == kernel.implementation().threads
    assert artifact.resources.shared_memory_bytes <= MOST_SHARED_MEMORY
    code = sass(artifact)
    assert "HMMA" in code
    assert "LDSM" in code


if EVERY_KERNEL:

    @pytest.mark.compile
    @both
    @pytest.mark.parametrize("room", ROOMS)
    def test_all_options_together_spill_nothing(name, room):
        args = meta(name, *room, **_everything(name))
        kernel = offered(args)[0]
        assert kernel.compile(args, cc=80).resources.spill_bytes == 0


def _everything(name):
    functions = ("score_mod",)
    found = {key: make for key, make in OPTIONS.items() if key not in functions}
    found["sink"] = lambda d: d.wides(d.H)
    if name == NAMES[1]:
        found["dBias"], found["dSink"] = OPTIONS["bias"], found["sink"]
    return found
