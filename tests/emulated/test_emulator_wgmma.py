"""wgmma in the emulator: operands as bulk copies lay them out, in every type and swizzle."""

import ml_dtypes
import numpy as np
import pytest
from support.ptx import EmulationError
from support.ptx.handwritten import FENCE, INITIALISE, Box, load, run, wait

K_BYTES = 32  # of one wgmma
N = 16
TYPES = {
    # type, its accumulator, the code in tensor maps
    "f16": (np.float16, "f32", 6),
    "bf16": (ml_dtypes.bfloat16, "f32", 10),
    "tf32": (np.float32, "f32", 7),
    "e4m3": (ml_dtypes.float8_e4m3fn, "f32", 0),
    "e5m2": (ml_dtypes.float8_e5m2, "f32", 0),
    "s8": (np.int8, "s32", 0),
    "u8": (np.uint8, "s32", 0),
}


def random_integers(shape, dtype, seed=0):
    low = 0 if np.dtype(dtype).kind == "u" else -2
    return np.random.default_rng(seed).integers(low, 3, shape).astype(dtype)


def descriptor(name, start, leading, stride, swizzle):
    """PTX that makes a matrix descriptor in %rd<name>; `start`: bytes behind the memory."""
    layout = (4 - swizzle) % 4 << 30
    return f"""
    add.u32 %r20, %r1, {start};
    shr.u32 %r20, %r20, 4;
    or.b32 %r20, %r20, {leading >> 4 << 16};
    mov.b64 %rd{name}, {{%r20, {stride >> 4 | layout}}};
    """


def multiply(kind, accumulator, columns, k, operands, immediates="", first=True):
    registers = ", ".join(f"%f{i}" for i in range(columns // 2))
    return f"""
    setp.eq.u32 %p3, 0, {int(first)};
    wgmma.mma_async.sync.aligned.m64n{columns}k{k}.{accumulator}.{kind}.{kind}
        {{{registers}}}, {operands}, %p3{immediates};
    """


OPEN = "wgmma.fence.sync.aligned;"
CLOSE = "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"


def store_accumulators(columns):
    """Thread after thread."""
    body = f"mul.lo.u32 %r9, %r0, {2 * columns}; cvt.u64.u32 %rd9, %r9; add.u64 %rd9, %rd9, %rd1;"
    for i in range(columns // 2):
        body += f"st.global.b32 [%rd9+{4 * i}], %f{i};"
    return body


def matrix_of(out, columns, accumulator):
    """D, of which thread t has rows t / 4 % 8 of its warp's 16, and pairs of columns."""
    values = out.view(np.float32 if accumulator == "f32" else np.int32).reshape(4, 8, 4, -1, 2, 2)
    # warp, row, pair, 8 columns, 8 rows further down, element of the pair
    return values.transpose(0, 4, 1, 3, 2, 5).reshape(64, columns)


def immediates_of(kind, transposed=(0, 0)):
    if kind in ("s8", "u8"):
        return ""
    return ", 1, 1" + (f", {transposed[0]}, {transposed[1]}" if kind in ("f16", "bf16") else "")


@pytest.mark.parametrize("swizzle", [1, 2, 3])
@pytest.mark.parametrize("kind", list(TYPES))
def test_k_major_operands(kind, swizzle):
    dtype, accumulator, code = TYPES[kind]
    span, itemsize = 16 << swizzle, np.dtype(dtype).itemsize
    k, depth = K_BYTES // itemsize, span // itemsize
    both = random_integers((64 + N, depth), dtype)
    body = INITIALISE + load((64 + N) * span) + wait() + OPEN
    for step in range(span // K_BYTES):
        body += descriptor(10, step * K_BYTES, 16, 8 * span, swizzle)
        body += descriptor(11, 64 * span + step * K_BYTES, 16, 8 * span, swizzle)
        body += multiply(kind, accumulator, N, k, "%rd10, %rd11", immediates_of(kind), step == 0)
    body += CLOSE + store_accumulators(N)
    box = Box((depth, 64 + N), swizzle, code)
    out = run(body, both, np.zeros(128 * N // 2, np.uint32), load_box=box)
    wide = both.astype(np.float64)
    assert (matrix_of(out, N, accumulator) == wide[:64] @ wide[64:].T).all()


def test_operands_without_a_swizzle():
    """Pieces of 8 rows of 16 bytes: here, those along K are 1280 bytes apart."""
    both = random_integers((64 + N, 16), np.float16)
    body = INITIALISE
    for piece in range(2):
        size = (64 + N) * 16
        body += load(size, f"{8 * piece}, 0", at=piece * size) + wait(piece)
    body += OPEN + descriptor(10, 0, 1280, 128, 0) + descriptor(11, 64 * 16, 1280, 128, 0)
    body += multiply("f16", "f32", N, 16, "%rd10, %rd11", immediates_of("f16"))
    body += CLOSE + store_accumulators(N)
    box = Box((8, 64 + N), 0, 6)
    out = run(body, both, np.zeros(128 * N // 2, np.uint32), load_box=box)
    wide = both.astype(np.float64)
    assert (matrix_of(out, N, "f32") == wide[:64] @ wide[64:].T).all()


@pytest.mark.parametrize("swizzle", [1, 2, 3])
def test_mn_major_operands(swizzle):
    """Boxes of a span of M or N by 16 of K, of which B has several."""
    span, columns = 16 << swizzle, 128
    wide_of_box, box_bytes = span // 2, 16 * span
    both = random_integers((16, 64 + columns), ml_dtypes.bfloat16)
    body = INITIALISE
    boxes = (64 + columns) // wide_of_box
    for i in range(boxes):
        body += load(box_bytes, f"{i * wide_of_box}, 0", at=i * box_bytes) + wait(i % 2)
    at_b = 64 // wide_of_box * box_bytes
    body += OPEN + descriptor(10, 0, box_bytes, 8 * span, swizzle)
    body += descriptor(11, at_b, box_bytes, 8 * span, swizzle)
    body += multiply("bf16", "f32", columns, 16, "%rd10, %rd11", immediates_of("bf16", (1, 1)))
    body += CLOSE + store_accumulators(columns)
    box = Box((wide_of_box, 16), swizzle, 10)
    out = run(body, both, np.zeros(128 * columns // 2, np.uint32), load_box=box)
    wide = both.astype(np.float64)
    assert (matrix_of(out, columns, "f32") == wide[:, :64].T @ wide[:, 64:]).all()


A_REGISTERS = "%r30, %r31, %r32, %r33"
LOAD_A = """
    shl.b32 %r9, %r2, 4;
    and.b32 %r10, %r0, 31;
    shr.u32 %r11, %r10, 2;
    add.u32 %r9, %r9, %r11;              // the row
    and.b32 %r10, %r0, 3;
    shl.b32 %r10, %r10, 2;
    mad.lo.u32 %r9, %r9, 32, %r10;
    cvt.u64.u32 %rd9, %r9;
    add.u64 %rd9, %rd9, %rd0;
    ld.global.b32 %r30, [%rd9];
    ld.global.b32 %r31, [%rd9+256];
    ld.global.b32 %r32, [%rd9+16];
    ld.global.b32 %r33, [%rd9+272];
"""


@pytest.mark.parametrize("kind", ["f16", "bf16", "tf32", "e4m3", "e5m2", "s8", "u8"])
def test_a_from_registers(kind):
    """Every register holds 4 bytes of a row: rows 8 apart, then 16 bytes further along K."""
    dtype, accumulator, code = TYPES[kind]
    k = K_BYTES // np.dtype(dtype).itemsize
    both = random_integers((64 + N, k), dtype)
    body = INITIALISE + load((64 + N) * K_BYTES) + wait() + LOAD_A
    body += OPEN + descriptor(11, 64 * K_BYTES, 16, 256, 1)
    immediates = immediates_of(kind)[: 9 if kind == "f16" else None]
    body += multiply(kind, accumulator, N, k, f"{{{A_REGISTERS}}}, %rd11", immediates)
    body += CLOSE + store_accumulators(N)
    box = Box((k, 64 + N), 1, code)
    out = run(body, both, np.zeros(128 * N // 2, np.uint32), load_box=box)
    wide = both.astype(np.float64)
    assert (matrix_of(out, N, accumulator) == wide[:64] @ wide[64:].T).all()


def test_tf32_drops_bits_and_signs_are_applied():
    both = np.full((64 + N, 8), 1 + 2.0**-12, np.float32)
    body = INITIALISE + load((64 + N) * 32) + wait() + OPEN
    body += descriptor(10, 0, 16, 256, 1) + descriptor(11, 64 * 32, 16, 256, 1)
    body += multiply("tf32", "f32", N, 8, "%rd10, %rd11", ", -1, 1")
    body += CLOSE + store_accumulators(N)
    box = Box((8, 64 + N), 1, 7)
    out = run(body, both, np.zeros(128 * N // 2, np.uint32), load_box=box)
    assert (out.view(np.float32) == -8).all()


# What is refused ----------------------------------------------------------------------------------

WHOLE = (
    INITIALISE
    + load((64 + N) * 32)
    + wait()
    + OPEN
    + descriptor(10, 0, 16, 256, 1)
    + descriptor(11, 64 * 32, 16, 256, 1)
    + multiply("f16", "f32", N, 16, "%rd10, %rd11", immediates_of("f16"))
    + CLOSE
    + store_accumulators(N)
)


def run_whole(body, threads=128, seed=0):
    both = random_integers((64 + N, 16), np.float16)
    output = np.zeros(128 * N // 2, np.uint32)
    run(body, both, output, load_box=Box((16, 64 + N), 1, 6), threads=threads, seed=seed)


def test_nothing_is_wrong_with_the_whole():
    run_whole(WHOLE)


@pytest.mark.parametrize(
    ("part", "replacement", "message"),
    [
        (OPEN, "", "before any wgmma.fence"),
        (OPEN, OPEN + "mov.b32 %f3, 0;", "uses %f3, written since the last wgmma.fence"),
        ("wgmma.wait_group.sync.aligned 0;", "", "uses %f0, which belongs to an unfinished"),
        ("wgmma.commit_group.sync.aligned;", "", "which belongs to an unfinished"),
        ("aligned 0;", "aligned 1;", "which belongs to an unfinished"),
        (wait(), "", "on its way|without having waited|never written"),
        (CLOSE, load((64 + N) * 32) + CLOSE, "writes what an unfinished wgmma still reads"),
        (CLOSE, CLOSE + load((64 + N) * 32), "writes what another warp reads"),
        (OPEN, OPEN + "setp.eq.u32 %p4, %r2, 3; @%p4 ret;", "the other warps of its group"),
        (OPEN, "st.shared.b32 [%r1], 0; bar.sync 0;" + OPEN, r"writes what|reads what"),
    ],
)
def test_what_wgmma_needs_is_not_left_out(part, replacement, message):
    assert part in WHOLE
    with pytest.raises(EmulationError, match=message):
        run_whole(WHOLE.replace(part, replacement))


FROM_REGISTERS = (
    INITIALISE
    + load((64 + N) * 32)
    + wait()
    + LOAD_A
    + OPEN
    + descriptor(11, 64 * 32, 16, 256, 1)
    + multiply("f16", "f32", N, 16, f"{{{A_REGISTERS}}}, %rd11", ", 1, 1, 0")
    + CLOSE
    + store_accumulators(N)
)


@pytest.mark.parametrize(
    ("part", "replacement", "message"),
    [
        (OPEN, OPEN + "mov.b32 %r31, 0;", "uses %r31, written since the last wgmma.fence"),
        (CLOSE, "mov.b32 %r31, 0;" + CLOSE, "uses %r31, which belongs to an unfinished"),
        (CLOSE, "mov.b32 %r9, %r31;" + CLOSE, "uses %r31, which belongs to an unfinished"),
    ],
)
def test_registers_of_a_are_left_alone_while_wgmma_reads_them(part, replacement, message):
    run_whole(FROM_REGISTERS)
    run_whole(FROM_REGISTERS.replace(CLOSE, CLOSE + "mov.b32 %r31, 0;"))
    with pytest.raises(EmulationError, match=message):
        run_whole(FROM_REGISTERS.replace(part, replacement))


def test_operands_written_by_threads_need_a_fence():
    body = INITIALISE + "mul.lo.u32 %r9, %r0, 16; add.u32 %r9, %r9, %r1;"
    for i in range(2):
        body += f"st.shared.v4.b32 [%r9+{2048 * i}], {{%r0, %r0, %r0, %r0}};"
    body += FENCE + "bar.sync 0;" + WHOLE[WHOLE.index(OPEN) :]
    run_whole(body)
    with pytest.raises(EmulationError, match=r"without fence\.proxy\.async"):
        run_whole(body.replace(FENCE, ""))


# Sums by bulk copies ------------------------------------------------------------------------------

ADD = """
    mul.lo.u32 %r9, %r0, 4;
    add.u32 %r9, %r9, %r1;
    cvt.rn.f32.u32 %f0, %r6;
    st.shared.f32 [%r9], %f0;
    fence.proxy.async.shared::cta;
    bar.sync 0;
    @%p0 cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%rd1], [%r1], 512;
    @%p0 cp.async.bulk.commit_group;
    @%p0 cp.async.bulk.wait_group 0;
"""


@pytest.mark.parametrize("seed", range(3))
def test_blocks_add_rows_of_float32(seed):
    start = 1000 - np.arange(128, dtype=np.float32)
    out = run(ADD, output=start, blocks=4, seed=seed, scratch=True)
    assert (out == start + 4 * np.arange(128) + 6 * 128).all()


@pytest.mark.parametrize("seed", range(3))
def test_threads_add_vectors_of_float32(seed):
    start = np.arange(512, dtype=np.float32)
    body = """
    mul.lo.u32 %r9, %r0, 16;
    cvt.u64.u32 %rd9, %r9;
    add.u64 %rd9, %rd9, %rd1;
    cvt.rn.f32.u32 %f0, %r6;
    mov.f32 %f1, 0f3F800000;
    red.global.add.v4.f32 [%rd9], {%f0, %f1, %f1, %f0};
    """
    out = run(body, output=start, blocks=3, seed=seed, scratch=True).reshape(-1, 4)
    thread = 3 * np.arange(128) + 3 * 128
    added = np.stack([thread, thread * 0 + 3, thread * 0 + 3, thread], -1)
    assert (out == start.reshape(-1, 4) + added).all()


def test_bytes_are_stored():
    body = ADD.replace("cp.reduce.", "cp.").replace(".bulk_group.add.f32", ".bulk_group")
    assert (run(body, output=np.zeros(128, np.float32)) == np.arange(128)).all()


@pytest.mark.parametrize(
    ("part", "replacement", "message"),
    [
        ("fence.proxy.async.shared::cta;", "", r"without fence\.proxy\.async"),
        ("bar.sync 0;", "", "what another warp writes|never written"),
        ("@%p0 cp.async.bulk.wait_group 0;", "", "exits while a bulk store reads"),
        ("wait_group 0;", "wait_group 0; @%p0 st.shared.f32 [%r1], %f0;", ""),
        ("wait_group 0;", "wait_group 1; @%p0 st.shared.f32 [%r1], %f0;", "still reads"),
        ("[%rd1], [%r1], 512", "[%rd1], [%r1], 500", "not by 16"),
        ("[%rd1], [%r1], 512", "[%rd1], [%r1], 528", "no element of an output|never written"),
    ],
)
def test_what_a_sum_needs_is_not_left_out(part, replacement, message):
    def runs():
        for seed in range(4):
            output = np.zeros(128, np.float32)
            run(ADD.replace(part, replacement), output=output, blocks=2, seed=seed, scratch=True)

    assert part in ADD
    if not message:
        runs()
        return
    with pytest.raises(EmulationError, match=message):
        runs()
