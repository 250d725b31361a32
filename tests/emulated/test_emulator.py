"""The emulator does what the PTX ISA says, and refuses what a GPU would let pass."""

import numpy as np
import pytest
from support.ptx import EmulationError, GlobalMemory, launch, parse
from support.ptx.arithmetic import high_half

_KERNEL = """
.version 8.0
.target sm_80
.address_size 64
.extern .shared .align 16 .b8 memory[];

.visible .entry kernel(.param .b64 input, .param .b64 output)
{{
    .reg .pred %p<8>;
    .reg .b16 %h<8>;
    .reg .b32 %r<64>;
    .reg .b64 %rd<16>;

    mov.u32 %r0, %tid.x;
    ld.param.b64 %rd0, [input];
    ld.param.b64 %rd1, [output];
    mad.wide.u32 %rd2, %r0, 4, %rd0;    // this thread's word of the input
    mad.wide.u32 %rd3, %r0, 4, %rd1;    // and of the output
{body}
    ret;
}}
"""


def run(body, input=None, *, words=None, threads=32, blocks=1, shared_bytes=0):
    """The output of a kernel, as 32-bit words, one per thread unless `words` says otherwise."""
    program = parse(_KERNEL.format(body=body))
    memory = GlobalMemory()
    input = np.zeros(threads, np.uint32) if input is None else np.ascontiguousarray(input)
    output = np.full(words or threads, 0xFFFFFFFF, np.uint32)
    placed = [
        memory.place(name, array.view(np.uint8), 0, array.shape, array.strides, 4, **how)
        for name, array, how in (
            ("input", input.view(np.uint32), {"alignment": 16}),
            ("output", output, {"alignment": 16, "output": True}),
        )
    ]
    parameters = [one.pointer.to_bytes(8, "little") for one in placed]
    launch(program, memory, parameters, blocks=blocks, threads=threads, shared_bytes=shared_bytes)
    return memory.storage(placed[1]).view(np.uint32).copy()


def bits(values, dtype=np.float32):
    return np.asarray(values, dtype).view(np.uint32)


# Registers ----------------------------------------------------------------------------------

MINUS = 1 << 32  # MINUS - 3 are the bits of -3


EXTREMES = [0, 1, 2**31, 2**32 - 1, 2**32 + 7, 2**63 - 1, 2**63, 2**64 - 3, 0xAAAAAAAAAAAAAAAB]


@pytest.mark.parametrize("signed", [False, True])
def test_the_high_half_of_a_product_is_that_of_whole_numbers(signed):
    kind = np.int64 if signed else np.uint64
    values = np.array(EXTREMES, np.uint64).view(kind)
    a, b = np.repeat(values, len(values)), np.tile(values, len(values))
    expected = [int(x) * int(y) >> 64 for x, y in zip(a, b, strict=True)]
    assert high_half(a, b).tolist() == expected


@pytest.mark.parametrize(
    ("instruction", "expected"),
    [
        ("add.s32 %r9, -1, 3", 2),
        ("sub.s32 %r9, 3, 5", MINUS - 2),
        ("mul.lo.s32 %r9, 0x10001, 0x10001", 0x20001),
        ("mul.hi.u32 %r9, 0x80000000, 6", 3),
        ("mul.hi.s32 %r9, 0x80000000, 6", MINUS - 3),
        ("mad.lo.s32 %r9, -3, 5, 1", MINUS - 14),
        ("div.s32 %r9, -7, 2", MINUS - 3),
        ("rem.s32 %r9, -7, 2", MINUS - 1),
        ("div.s32 %r9, 0x80000000, 3", MINUS - 715827882),
        ("div.u32 %r9, -7, 2", 0x7FFFFFFC),
        ("div.s32 %r9, 7, 0", MINUS - 1),
        ("min.s32 %r9, -1, 1", MINUS - 1),
        ("min.u32 %r9, -1, 1", 1),
        ("max.s32 %r9, -1, 1", 1),
        ("neg.s32 %r9, 5", MINUS - 5),
        ("abs.s32 %r9, -5", 5),
        ("shl.b32 %r9, 3, 31", 0x80000000),
        ("shl.b32 %r9, 3, 32", 0),
        ("shr.s32 %r9, -8, 1", MINUS - 4),
        ("shr.s32 %r9, -8, 40", MINUS - 1),
        ("shr.u32 %r9, -8, 40", 0),
        ("shr.u32 %r9, -8, 28", 15),
        ("not.b32 %r9, 5", MINUS - 6),
        ("lop3.b32 %r9, 0b1100, 0b1010, 0b0110, 0x96", 0b0000),
        ("lop3.b32 %r9, 0b1100, 0b1010, 0b0110, 0xE8", 0b1110),
        ("prmt.b32 %r9, 0x33221100, 0x77665544, 0x7250", 0x77225500),
        ("prmt.b32 %r9, 0x33221180, 0x77665544, 0x8888", 0xFFFFFFFF),
        ("dp2a.lo.u32.s32 %r9, 0xFFFF0002, 0xFE03, 5", 11 - 2 * 0xFFFF + (1 << 32)),
        ("dp2a.hi.s32.u32 %r9, 0xFFFF0002, 0xFE030000, 5", 11 - 0xFE + (1 << 32)),
        ("bfe.u32 %r9, 0xABCD, 4, 8", 0xBC),
        ("bfe.s32 %r9, 0xABCD, 4, 8", MINUS - 0x44),
        ("bfi.b32 %r9, 0xFF, 0x11111111, 8, 4", 0x11111F11),
        ("shf.l.wrap.b32 %r9, 0x80000001, 0x7, 1", 0xF),
        ("shf.r.wrap.b32 %r9, 0x80000001, 0x7, 33", 0xC0000000),
        ("shf.r.clamp.b32 %r9, 0x80000001, 0x7, 33", 7),
        ("mov.b32 %r9, 0f3F800000", 0x3F800000),
        ("add.f32 %r9, 0f3F800000, 0f3F800000", 0x40000000),
        ("fma.rn.f32 %r9, 0f40000000, 0f40400000, 0f3F800000", bits(7.0)),
        ("cvt.rn.f32.s32 %r9, -3", bits(-3.0)),
        ("cvt.rn.bf16x2.f32 %r9, 0f3F800000, 0f40490FDB", 0x3F804049),
        ("cvt.rn.f16x2.f32 %r9, 0f3F800000, 0f40490FDB", 0x3C004248),
        ("cvt.rn.bf16x2.f32 %r9, 0f3F808000, 0f3F818000", 0x3F803F82),
        ("cvt.rna.tf32.f32 %r9, 0f3F801000", 0x3F802000),
        ("cvt.rna.tf32.f32 %r9, 0fBF800FFF", 0xBF800000),
        ("cvt.rna.tf32.f32 %r9, 0f7F800000", 0x7F800000),
    ],
)
def test_instructions_of_one_word(instruction, expected):
    assert (run(f"{instruction}; st.global.b32 [%rd3], %r9;") == np.uint32(expected)).all()


@pytest.mark.parametrize(
    ("instruction", "expected"),
    [
        ("mul.wide.s32 %rd9, -3, 5", -15),
        ("mul.wide.u32 %rd9, -3, 5", 5 * (MINUS - 3)),
        ("mad.wide.s32 %rd9, -3, 5, 1", -14),
        ("mad.lo.s64 %rd9, -3, 5, 1", -14),
        ("shl.b64 %rd9, 1, 40", 1 << 40),
        ("cvt.s64.s32 %rd9, 0xFFFFFFFE", -2),
        ("cvt.u64.u32 %rd9, 0xFFFFFFFE", MINUS - 2),
        ("cvt.s64.s16 %rd9, 0x1FFFF", -1),
        ("mov.b64 %rd9, {5, 7}", (7 << 32) + 5),
    ],
)
def test_instructions_of_two_words(instruction, expected):
    out = run(
        f"{instruction}; mad.wide.u32 %rd4, %r0, 8, %rd1; st.global.b64 [%rd4], %rd9;", words=64
    )
    assert (out.view(np.int64) == expected).all()


@pytest.mark.parametrize(
    ("comparison", "a", "b", "expected"),
    [
        ("lt.s32", -1, 1, True),
        ("lt.u32", -1, 1, False),
        ("ge.s32", 1, 1, True),
        ("eq.b32", 1, 1, True),
        ("ne.b32", 1, 1, False),
        ("lt.f32", "0f3F800000", "0f40000000", True),
        ("eq.f32", "0f7FC00000", "0f7FC00000", False),
        ("neu.f32", "0f7FC00000", "0f7FC00000", True),
        ("ne.f32", "0f3F800000", "0f40000000", True),
        ("ne.f32", "0f3F800000", "0f7FC00000", False),
    ],
)
def test_comparisons(comparison, a, b, expected):
    body = f"setp.{comparison} %p0, {a}, {b}; selp.b32 %r9, 1, 0, %p0; st.global.b32 [%rd3], %r9;"
    assert (run(body) == expected).all()


def test_halves_of_registers():
    body = """
        mov.b32 {%h0, %h1}, 0x00020001;
        mov.b32 %r9, {%h1, %h0};
        cvt.u32.u16 %r10, %h1;
        add.s32 %r9, %r9, %r10;
        st.global.b32 [%rd3], %r9;
    """
    assert (run(body) == 0x00010004).all()


def test_shuffles_stay_in_their_segment():
    def shuffled(mode, argument, clamp):
        body = f"shfl.sync.{mode}.b32 %r9, %r0, {argument}, {clamp}, -1; st.global.b32 [%rd3], %r9;"
        return run(body).tolist()

    lanes = range(32)
    assert shuffled("idx", 5, 31) == [5] * 32
    assert shuffled("bfly", 3, 31) == [lane ^ 3 for lane in lanes]
    assert shuffled("up", 2, 0) == [max(lane - 2, lane % 2 if lane < 2 else 0) for lane in lanes]
    assert shuffled("down", 30, 31) == [lane + 30 if lane < 2 else lane for lane in lanes]
    eights = 0x1800 | 7 | 0x18  # segments of 8 lanes
    assert shuffled("idx", 1, eights) == [lane // 8 * 8 + 1 for lane in lanes]


def test_braces_have_registers_of_their_own():
    body = """
        mov.u32 %r9, 7;
        { .reg .b32 inner; mov.u32 inner, 1; { .reg .b32 inner; mov.u32 inner, 2; }
          add.s32 %r9, %r9, inner; }
        st.global.b32 [%rd3], %r9;   /* 8 */
    """
    assert (run(body) == 8).all()


# Control flow -------------------------------------------------------------------------------


def test_threads_take_different_branches_and_meet_again():
    body = """
        and.b32 %r1, %r0, 1;
        setp.eq.b32 %p0, %r1, 0;
        mov.u32 %r9, 100;
        @%p0 bra EVEN;
        add.s32 %r9, %r9, 1;
        bra.uni BOTH;
    EVEN:
        add.s32 %r9, %r9, 2;
    BOTH:
        shfl.sync.bfly.b32 %r10, %r9, 1, 31, -1;
        @!%p0 mov.u32 %r10, 0;
        st.global.b32 [%rd3], %r10;
    """
    assert run(body).tolist() == [101, 0] * 16


def test_threads_leave_a_loop_at_different_times():
    body = """
        mov.u32 %r9, 0;
        mov.u32 %r1, 0;
    LOOP:
        setp.ge.u32 %p0, %r1, %r0;
        @%p0 bra DONE;
        add.s32 %r1, %r1, 1;
        add.s32 %r9, %r9, %r1;
        bra LOOP;
    DONE:
        bar.sync 0;
        st.global.b32 [%rd3], %r9;
    """
    assert run(body, threads=64).tolist() == [n * (n + 1) // 2 for n in range(64)]


def test_blocks_have_shared_memory_of_their_own():
    body = """
        mov.u32 %r1, %ctaid.x;
        mov.u32 %r2, %ntid.x;
        mad.lo.s32 %r3, %r1, %r2, %r0;
        mov.b32 %r4, memory;
        mad.lo.s32 %r5, %r0, 4, %r4;
        st.shared.b32 [%r5], %r3;
        bar.sync 0;
        xor.b32 %r6, %r0, 63;
        mad.lo.s32 %r6, %r6, 4, %r4;
        ld.shared.b32 %r7, [%r6];
        mad.wide.u32 %rd4, %r3, 4, %rd1;
        st.global.b32 [%rd4], %r7;
    """
    out = run(body, words=192, threads=64, blocks=3, shared_bytes=256)
    assert out.tolist() == [n - n % 64 + (63 - n % 64) for n in range(192)]


def test_what_never_ends_is_an_error(monkeypatch):
    monkeypatch.setattr("support.ptx.grid.MOST_BRANCHES", 100)
    with pytest.raises(EmulationError, match="does not come to an end"):
        run("LOOP: bra LOOP;")


def test_a_part_of_a_warp_cannot_synchronize():
    body = "setp.lt.u32 %p0, %r0, 5; @%p0 bra L; ret; L: bar.sync 0;"
    with pytest.raises(EmulationError, match=r"bar.sync 0.*part of a warp"):
        run(body)


def test_a_barrier_waits_for_all_threads():
    body = "setp.lt.u32 %p0, %r0, 32; @%p0 bra L; ret; L: bar.sync 0;"
    with pytest.raises(EmulationError, match="wait at a barrier, others have returned"):
        run(body, threads=64)


# What is refused ----------------------------------------------------------------------------


def test_unknown_instructions_are_refused_even_where_nobody_comes():
    with pytest.raises(EmulationError, match=r"does not know.*'add.sat.s32 %r1, %r0, 1'"):
        run("bra END; add.sat.s32 %r1, %r0, 1; END:")


def test_registers_without_a_value_are_refused():
    with pytest.raises(EmulationError, match="reads %r5, which has no value"):
        run("add.s32 %r6, %r5, 1;")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("ld.global.b32 %r9, [%rd2+4];", "reads what is no element of an input.*thread 31"),
        ("ld.global.b32 %r9, [%rd2+-4];", "reads what is no element of an input.*thread 0"),
        ("ld.global.b32 %r9, [%rd2+1];", "no multiple of 4 bytes.*thread 0"),
        ("ld.global.b32 %r9, [%rd3];", "reads what is no element of an input"),
        ("st.global.b32 [%rd2], %r0;", "writes what is no element of an output"),
        ("st.global.b32 [%rd1], %r0;", "writes what another writes"),
        ("ld.global.b32 %r9, [0];", "reads what is no element of an input, at 0x0"),
        ("cvt.u32.u64 %r1, %rd2; cvt.u64.u32 %rd4, %r1; ld.global.b32 %r9, [%rd4];", "no element"),
        ("ld.shared.b32 %r9, [256];", "is outside of 256 bytes"),
        ("ld.shared.b32 %r9, [0]; mov.u32 %r10, %r9;", "reads what was never written"),
        ("st.shared.b32 [0], %r0;", "writes what another thread writes"),
    ],
)
def test_wrong_accesses_are_refused(body, message):
    with pytest.raises(EmulationError, match=message) as refused:
        run(body, shared_bytes=256)
    assert "%r9" in str(refused.value) or "st." in str(refused.value)


def test_padding_between_rows_belongs_to_nobody():
    memory = GlobalMemory()
    rows = np.zeros((3, 4), np.uint32)
    placed = memory.place(
        "rows", rows.reshape(-1).view(np.uint8), 0, (3, 3), (16, 4), 4, alignment=4
    )
    assert placed.elements.tolist() == ([True] * 12 + [False] * 4) * 3
    assert placed.pointer % 8 == 4


def test_what_the_compiler_loads_and_nobody_reads_may_be_missing():
    body = """
        setp.eq.b32 %p0, %r0, 0;
        @%p0 st.shared.b32 [0], 7;
        bar.warp.sync -1;
        ld.shared.v2.b32 {%r9, %r10}, [0];
        st.global.b32 [%rd3], %r9;
    """
    assert (run(body, shared_bytes=8) == 7).all()
    with pytest.raises(EmulationError, match="reads what was never written, at 0x4"):
        run(body + "add.s32 %r9, %r9, %r10;", shared_bytes=8)


_EXCHANGE = """
        mad.lo.s32 %r1, %r0, 4, 0;
        xor.b32 %r2, %r1, 128;              // the other warp's
        st.shared.b32 [%r1], %r0;
        {after_write}
        ld.shared.b32 %r9, [%r2];
        {after_read}
        st.shared.b32 [%r1], 5;
        st.global.b32 [%rd3], %r9;
"""


def test_warps_exchange_through_shared_memory_with_barriers():
    body = _EXCHANGE.format(after_write="bar.sync 0;", after_read="bar.sync 0;")
    assert run(body, threads=64, shared_bytes=256).tolist() == [n ^ 32 for n in range(64)]


@pytest.mark.parametrize(
    ("barriers", "message"),
    [
        (("", "bar.sync 0;"), "reads what another warp writes, with no barrier"),
        (("bar.sync 0;", ""), "writes what another warp reads, with no barrier"),
    ],
)
def test_races_are_refused(barriers, message):
    body = _EXCHANGE.format(after_write=barriers[0], after_read=barriers[1])
    with pytest.raises(EmulationError, match=message):
        run(body, threads=64, shared_bytes=256)


# Asynchronous copies ------------------------------------------------------------------------

_COPY = """
        mad.wide.u32 %rd4, %r0, 16, %rd0;
        mad.lo.s32 %r1, %r0, 16, 0;
        cp.async.cg.shared.global [%r1], [%rd4], 16, {inside};
        cp.async.commit_group;
        cp.async.cg.shared.global [%r1+512], [%rd4], 16;
        cp.async.commit_group;
        {wait}
        ld.shared.v4.b32 {{%r4, %r5, %r6, %r7}}, [%r1{place}];
        mad.wide.u32 %rd5, %r0, 16, %rd1;
        st.global.v4.b32 [%rd5], {{%r4, %r5, %r6, %r7}};
"""


def copied(wait, place="", inside="16"):
    words = np.arange(1, 129, dtype=np.uint32)
    body = _COPY.format(wait=wait, place=place, inside=inside)
    return words, run(body, words, words=128, shared_bytes=1024)


def test_a_copy_arrives_when_its_group_is_waited_for():
    words, out = copied("cp.async.wait_group 1;")
    assert (out == words).all()
    words, out = copied("cp.async.wait_group 0;", "+512")
    assert (out == words).all()
    words, out = copied("cp.async.wait_all;", "+512")
    assert (out == words).all()


@pytest.mark.parametrize(
    ("wait", "place"),
    [("", ""), ("cp.async.wait_group 2;", ""), ("cp.async.wait_group 1;", "+512")],
)
def test_a_copy_that_was_not_waited_for_cannot_be_read(wait, place):
    with pytest.raises(EmulationError, match="reads what a copy is on its way to"):
        copied(wait, place)


def test_another_warp_sees_a_copy_behind_a_barrier_only():
    body = """
        cp.async.ca.shared.global [%r1], [%rd2], 4;
        cp.async.wait_all;
        {barrier}
        ld.shared.b32 %r9, [%r2];
        st.global.b32 [%rd3], %r9;
    """
    places = "mad.lo.s32 %r1, %r0, 4, 0; xor.b32 %r2, %r1, 128;"
    words = np.arange(64, dtype=np.uint32)
    out = run(places + body.format(barrier="bar.sync 0;"), words, threads=64, shared_bytes=256)
    assert out.tolist() == [n ^ 32 for n in range(64)]
    with pytest.raises(EmulationError, match="reads what another warp writes"):
        run(places + body.format(barrier=""), words, threads=64, shared_bytes=256)


@pytest.mark.parametrize("inside", [0, 4, 10])
def test_a_copy_fills_up_with_zeros(inside):
    words, out = copied("cp.async.wait_all;", inside=str(inside))
    expected = words.view(np.uint8).reshape(32, 16).copy()
    expected[:, inside:] = 0
    assert (out.view(np.uint8).reshape(32, 16) == expected).all()


def test_a_copy_reads_nothing_behind_its_source_size():
    body = """
        add.s64 %rd4, %rd0, 112;
        cp.async.cg.shared.global [0], [%rd4], 16, {inside};
    """
    lonely = "setp.ne.b32 %p0, %r0, 0; @%p0 bra END;" + body + "END:"
    words = np.zeros(30, np.uint32)  # the last vector of 16 bytes has 8
    run(lonely.format(inside=8), words, shared_bytes=16)
    with pytest.raises(EmulationError, match=r"reads what is no element of an input.*thread 0\)"):
        run(lonely.format(inside=9), words, shared_bytes=16)
    with pytest.raises(EmulationError, match="reads more bytes than it copies"):
        run(lonely.format(inside=17), words, shared_bytes=16)


def test_nobody_writes_where_a_copy_is_on_its_way_to():
    body = "mad.lo.s32 %r1, %r0, 4, 0; cp.async.ca.shared.global [%r1], [%rd2], 4;"
    for again in ("st.shared.b32 [%r1], 0;", "cp.async.ca.shared.global [%r1], [%rd2], 4;"):
        with pytest.raises(EmulationError, match="writes what a copy is on its way to"):
            run(body + again, shared_bytes=128)


# Matrices: layouts are spelled out here as the PTX ISA's text does ------------------------------


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix(count, transposed):
    """Matrix i has rows of 16 bytes at the addresses of lanes 8 i to 8 i + 7."""
    elements = np.arange(count * 64, dtype=np.uint16).reshape(count, 8, 8)
    stores = "".join(
        f"ld.global.b32 %r9, [%rd2+{128 * i}]; st.shared.b32 [%r1+{128 * i}], %r9;"
        for i in range(count)
    )
    names = ", ".join(f"%r{10 + i}" for i in range(count))
    results = "".join(f"st.global.b32 [%rd3+{128 * i}], %r{10 + i};" for i in range(count))
    suffix = ".trans" if transposed else ""
    body = f"""
        mad.lo.s32 %r1, %r0, 4, 0;
        {stores}
        rem.u32 %r2, %r0, {8 * count};
        mul.lo.s32 %r2, %r2, 16;
        ldmatrix.sync.aligned.m8n8.x{count}{suffix}.shared.b16 {{{names}}}, [%r2];
        {results}
    """
    out = run(body, elements.reshape(-1), words=32 * count, shared_bytes=128 * count)
    for i, matrix in enumerate(elements):
        for lane in range(32):
            row, column = lane // 4, 2 * (lane % 4)
            pair = matrix[column : column + 2, row] if transposed else matrix[row, column:][:2]
            assert out[32 * i + lane] == int(pair[0]) | int(pair[1]) << 16


def _mma_fragments(k, bytes_each):
    """Where element i of a lane lies in A, B and C, as functions of (i, lane)."""

    def a_16bit(i, lane):  # .m16n8k16, "Matrix Fragments for mma.m16n8k16 with floating point type"
        row = lane // 4 if i < 2 or 4 <= i < 6 else lane // 4 + 8
        return row, (lane % 4) * 2 + (i & 1) + (8 if i >= 4 else 0)

    def b_16bit(i, lane):
        return (lane % 4) * 2 + (i & 1) + (8 if i >= 2 else 0), lane // 4

    def a_tf32(i, lane):  # .m16n8k8 with .tf32
        return (lane // 4 if i in (0, 2) else lane // 4 + 8), lane % 4 + (4 if i >= 2 else 0)

    def b_tf32(i, lane):
        return lane % 4 + (4 if i == 1 else 0), lane // 4

    def c(i, lane):
        return (lane // 4 if i < 2 else lane // 4 + 8), (lane % 4) * 2 + (i & 1)

    return (a_16bit, b_16bit, c) if bytes_each == 2 else (a_tf32, b_tf32, c)


@pytest.mark.parametrize("kind", ["f16", "bf16", "tf32"])
def test_mma(kind):
    k, per_register = (8, 1) if kind == "tf32" else (16, 2)
    generator = np.random.default_rng(0)
    A, B, C = (
        generator.integers(-8, 9, shape).astype(np.float32) for shape in ((16, k), (k, 8), (16, 8))
    )
    at_a, at_b, at_c = _mma_fragments(k, 4 // per_register)

    def encoded(value):
        if kind == "f16":
            return int(np.float16(value).view(np.uint16))
        word = int(np.float32(value).view(np.uint32))
        # The 13 lowest bits of tf32 operands are ignored.
        return word >> 16 if kind == "bf16" else word | 0x1FFF

    def registers(matrix, where, count):
        words = np.zeros((count // per_register, 32), np.uint32)
        for lane in range(32):
            for i in range(count):
                shift = 16 * (i % per_register)
                words[i // per_register, lane] |= encoded(matrix[where(i, lane)]) << shift
        return words

    a, b = registers(A, at_a, 4 * per_register), registers(B, at_b, 2 * per_register)
    c = np.array([[bits(C[at_c(i, lane)]) for lane in range(32)] for i in range(4)])
    words = np.concatenate([a, b, c]).astype(np.uint32)
    loads = "".join(f"ld.global.b32 %r{10 + i}, [%rd2+{128 * i}];" for i in range(10))
    stores = "".join(f"st.global.b32 [%rd3+{128 * i}], %r{30 + i};" for i in range(4))
    shape = f"m16n8k{k}.row.col.f32.{kind}.{kind}.f32"
    body = f"""
        {loads}
        mma.sync.aligned.{shape} {{%r30, %r31, %r32, %r33}}, {{%r10, %r11, %r12, %r13}},
            {{%r14, %r15}}, {{%r16, %r17, %r18, %r19}};
        {stores}
    """
    out = run(body, words.reshape(-1), words=128).view(np.float32).reshape(4, 32)
    D = A @ B + C
    for lane in range(32):
        for i in range(4):
            assert out[i, lane] == D[at_c(i, lane)]
