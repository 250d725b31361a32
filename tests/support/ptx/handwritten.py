"""Runs hand-written PTX for Hopper, with an input and an output that tensor maps describe."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from support.ptx.hopper import launch
from support.ptx.host import Launch
from support.ptx.memory import GlobalMemory
from support.ptx.program import parse
from support.ptx.tensor_map import TensorMap

#: Where the mbarriers of the snippets are in shared memory, behind what is loaded.
BARRIER = 65536

_KERNEL = """
.version 8.0
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 memory[];

.visible .entry kernel(.param .b64 input, .param .b64 output,
    .param .align 64 .b8 input_map[128], .param .align 64 .b8 output_map[128])
{{
    .reg .pred %p<8>;
    .reg .b16 %h<8>;
    .reg .b32 %r<64>;
    .reg .b32 %f<128>;
    .reg .b64 %rd<32>;

    mov.u32 %r0, %tid.x;
    shr.u32 %r2, %r0, 5;                 // the warp
    mov.u32 %r3, %cluster_ctarank;
    mov.u32 %r1, memory;
    ld.param.b64 %rd0, [input];
    ld.param.b64 %rd1, [output];
    mov.b64 %rd2, input_map;
    cvta.param.u64 %rd2, %rd2;
    mov.b64 %rd3, output_map;
    cvta.param.u64 %rd3, %rd3;
    mov.u32 %r4, %ctaid.x;
    mov.u32 %r5, %ntid.x;
    mad.lo.s32 %r6, %r4, %r5, %r0;       // the thread, counted through all blocks
    mad.wide.u32 %rd4, %r6, 4, %rd1;     // its word of the output
    setp.eq.u32 %p0, %r0, 0;
    setp.eq.u32 %p1, %r2, 0;
{body}
    ret;
}}
"""

#: A barrier of one arrival, which all threads know.
INITIALISE = f"""
    @%p0 mbarrier.init.shared.b64 [%r1+{BARRIER}], 1;
    fence.mbarrier_init.release.cluster;
    bar.sync 0;
"""

FENCE = "fence.proxy.async.shared::cta;"


def load(size: int, coordinates: str = "0, 0", at: int = 0, barrier: int = BARRIER) -> str:
    """Thread 0 loads a box of so many bytes."""
    rank = coordinates.count(",") + 1
    return f"""{{
    @!%p0 bra LOADED;
    mbarrier.arrive.expect_tx.shared.b64 %rd9, [%r1+{barrier}], {size};
    cp.async.bulk.tensor.{rank}d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r1+{at}],
        [%rd2, {{{coordinates}}}], [%r1+{barrier}];
    LOADED:
    }}"""


def wait(parity: int = 0, barrier: int = BARRIER) -> str:
    return f"""{{
    .reg .pred PASSED;
    AGAIN:
    mbarrier.try_wait.parity.shared.b64 PASSED, [%r1+{barrier}], {parity}, 10000000;
    @PASSED bra DONE;
    bra AGAIN;
    DONE:
    }}"""


def store(coordinates: str = "0, 0", at: int = 0) -> str:
    """Thread 0 stores a box; nobody waits for it."""
    rank = coordinates.count(",") + 1
    return f"""{{
    @!%p0 bra STORED;
    cp.async.bulk.tensor.{rank}d.global.shared::cta.tile.bulk_group
        [%rd3, {{{coordinates}}}], [%r1+{at}];
    cp.async.bulk.commit_group;
    STORED:
    }}"""


@dataclass(frozen=True)
class Box:
    """What a tensor map says beside where the tensor is."""

    shape: tuple[int, ...]  # of the box; the fastest mode first
    swizzle: int = 0
    type_code: int = 2  # 32-bit integers


def run(
    body: str,
    input: np.ndarray | None = None,
    output: np.ndarray | None = None,
    *,
    load_box: Box | None = None,
    store_box: Box | None = None,
    threads: int = 128,
    blocks: int = 1,
    cluster: int = 1,
    shared_bytes: int = 80 * 1024,
    scratch: bool = False,
    seed: int = 0,
    has_inputs: bool = False,
) -> np.ndarray:
    """The output; one word for each thread by default.

    Args:
        scratch: The output may be read, and written several times.
        has_inputs: Whether a kernel of the same call is before it.
    """
    program = parse(_KERNEL.format(body=body))
    memory = GlobalMemory()
    input = np.zeros((threads,), np.uint32) if input is None else np.ascontiguousarray(input)
    if output is None:
        output = np.zeros(threads * blocks, np.uint32)
    placed = []
    for name, array, how in (
        ("input", input, {}),
        ("output", output, {"scratch": True} if scratch else {"output": True}),
    ):
        placed.append(
            memory.place(
                name,
                array.reshape(-1).view(np.uint8),
                0,
                array.shape,
                array.strides,
                array.itemsize,
                alignment=16,
                **how,
            )
        )
    maps = [
        _map(one.pointer, array, box)
        for one, array, box in zip(placed, (input, output), (load_box, store_box), strict=True)
    ]
    pointers = [one.pointer.to_bytes(8, "little") for one in placed]
    asked = Launch(
        "kernel",
        (blocks, 1, 1),
        (threads, 1, 1),
        (cluster, 1, 1),
        shared_bytes,
        (*pointers, *maps),
    )
    launch(program, memory, asked, seed=seed, has_inputs=has_inputs)
    return memory.storage(placed[1]).view(output.dtype).reshape(output.shape).copy()


def _map(pointer: int, array: np.ndarray, box: Box | None) -> bytes:
    if box is None:
        return bytes(128)
    return TensorMap(
        pointer,
        array.itemsize,
        array.shape[::-1],
        array.strides[::-1],
        box.shape,
        box.swizzle,
    ).encode(box.type_code)
