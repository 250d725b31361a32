"""The emulator's Hopper parts do what the PTX ISA says, and refuse what a GPU would let pass."""

import numpy as np
import pytest
from support.ptx import EmulationError
from support.ptx.handwritten import BARRIER, FENCE, INITIALISE, Box, load, run, store, wait
from support.ptx.tensor_map import TensorMap

ANY_ORDER = range(6)  # seeds

EVERY_WORD = """
    shl.b32 %r9, %r0, 2;
    add.s32 %r9, %r9, %r1;
    ld.shared.b32 %r10, [%r9];
    st.global.b32 [%rd4], %r10;
"""


def words(*shape):
    return np.arange(np.prod(shape), dtype=np.uint32).reshape(shape) + 1


# Bulk copies --------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", ANY_ORDER)
def test_a_box_is_loaded(seed):
    body = INITIALISE + load(512) + wait() + EVERY_WORD
    out = run(body, words(40, 20), load_box=Box((8, 16)), seed=seed)
    assert (out.reshape(16, 8) == words(40, 20)[:16, :8]).all()


def test_what_is_outside_of_the_tensor_is_zero():
    body = INITIALISE + load(512, "-3, 30") + wait() + EVERY_WORD
    out = run(body, words(40, 20), load_box=Box((8, 16))).reshape(16, 8)
    expected = np.zeros((16, 8), np.uint32)
    expected[:10, 3:] = words(40, 20)[30:, :5]
    assert (out == expected).all()


@pytest.mark.parametrize(("swizzle", "pieces"), [(1, 2), (2, 4), (3, 8)])
def test_swizzles_exchange_pieces_of_16_bytes(swizzle, pieces):
    rows = 512 // (16 * pieces)
    body = INITIALISE + load(512) + wait() + EVERY_WORD
    out = run(body, words(rows, 4 * pieces), load_box=Box((4 * pieces, rows), swizzle))
    found = out.reshape(rows, pieces, 4)
    tensor = words(rows, 4 * pieces).reshape(rows, pieces, 4)
    for row in range(rows):
        turn = row // (8 // pieces) % pieces  # rows of a span of 128 bytes share a turn
        for piece in range(pieces):
            assert (found[row, piece ^ turn] == tensor[row, piece]).all()


def test_three_modes():
    body = INITIALISE + load(512, "4, 1, 2") + wait() + EVERY_WORD
    out = run(body, words(5, 6, 8), load_box=Box((4, 8, 4))).reshape(4, 8, 4)
    expected = np.zeros((4, 8, 4), np.uint32)
    expected[:3, :5] = words(5, 6, 8)[2:, 1:, 4:]
    assert (out == expected).all()


WRITE_SHARED = """
    shl.b32 %r9, %r0, 2;
    add.s32 %r9, %r9, %r1;
    st.shared.b32 [%r9], %r0;
"""
DRAIN = "cp.async.bulk.wait_group.read 0;"


@pytest.mark.parametrize("seed", ANY_ORDER)
def test_a_box_is_stored_and_clipped(seed):
    body = WRITE_SHARED + FENCE + "bar.sync 0;" + store("-2, 3") + DRAIN
    out = run(body, output=np.zeros((10, 4), np.uint32), store_box=Box((8, 16)), seed=seed)
    expected = np.zeros((10, 4), np.uint32)
    expected[3:, :] = np.arange(128).reshape(16, 8)[:7, 2:6]
    assert (out == expected).all()


def test_tensor_maps_are_read_as_they_are_encoded():
    a_map = TensorMap(1 << 40, 2, (64, 5, 1 << 20), (2, 128, 1 << 37), (64, 4, 2), 3, True)
    assert TensorMap.decode(a_map.encode(6)) == a_map


def test_unknown_bits_of_tensor_maps_are_refused():
    encoded = bytearray(TensorMap(1 << 40, 2, (64,), (2,), (64,), 0).encode(6))
    encoded[11] |= 0x80
    with pytest.raises(EmulationError, match="of kind"):
        TensorMap.decode(encoded)


COPY = f"""
    shl.b32 %r9, %r0, 2;
    add.s32 %r9, %r9, %r1;
    mad.wide.u32 %rd9, %r0, 4, %rd0;
    cp.async.ca.shared.global [%r9], [%rd9], 4;
    cp.async.mbarrier.arrive.noinc.shared.b64 [%r1+{BARRIER}];
"""
OTHERS_WORD = """
    xor.b32 %r9, %r0, 127;
    shl.b32 %r9, %r9, 2;
    add.s32 %r9, %r9, %r1;
    ld.shared.b32 %r10, [%r9];
    st.global.b32 [%rd4], %r10;
"""


@pytest.mark.parametrize("seed", ANY_ORDER)
def test_copies_of_threads_arrive_at_an_mbarrier(seed):
    body = INITIALISE.replace("], 1;", "], 128;") + COPY + wait() + OTHERS_WORD
    assert (run(body, words(128), seed=seed) == words(128)[::-1]).all()
    with pytest.raises(EmulationError, match=r"on its way|without having waited|never written"):
        run(body.replace(wait(), ""), words(128), seed=seed)


# Clusters -----------------------------------------------------------------------------------

MEET = "barrier.cluster.arrive.relaxed; barrier.cluster.wait;"
EXPECT = f"@%p0 mbarrier.arrive.expect_tx.shared.b64 %rd9, [%r1+{BARRIER}], 512;"
MULTICAST = f"""{{
    setp.ne.u32 %p2, %r3, 0;
    @%p2 bra LOADED;
    @!%p0 bra LOADED;
    mov.u16 %h0, 3;
    cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster
        [%r1], [%rd2, {{0, 0}}], [%r1+{BARRIER}], %h0;
    LOADED:
    }}"""
LEAVE = "barrier.cluster.arrive; barrier.cluster.wait;"


@pytest.mark.parametrize("seed", ANY_ORDER)
def test_multicast_reaches_every_block_and_its_barrier(seed):
    body = INITIALISE + MEET + EXPECT + MULTICAST + wait() + EVERY_WORD + LEAVE
    out = run(body, words(16, 8), load_box=Box((8, 16)), blocks=4, cluster=2, seed=seed)
    assert (out.reshape(4, 16, 8) == words(16, 8)).all()


def test_multicast_before_the_blocks_have_met_is_found():
    body = INITIALISE + EXPECT + MULTICAST + wait() + EVERY_WORD + LEAVE
    with pytest.raises(EmulationError, match=r"before it has seen the init|none is initialised"):
        run(body, words(16, 8), load_box=Box((8, 16)), blocks=2, cluster=2)


REMOTE_ARRIVAL = f"""
    xor.b32 %r7, %r3, 1;
    add.s32 %r8, %r1, {BARRIER};
    mapa.shared::cluster.u32 %r8, %r8, %r7;
    @%p0 mbarrier.arrive.shared::cluster.b64 _, [%r8];
"""


@pytest.mark.parametrize("seed", ANY_ORDER)
def test_blocks_arrive_at_each_others_barriers(seed):
    body = INITIALISE + MEET + REMOTE_ARRIVAL + wait() + LEAVE
    run(body, blocks=2, cluster=2, seed=seed)


def test_an_arrival_at_a_block_that_has_exited_is_found():
    body = INITIALISE + MEET + "setp.eq.u32 %p3, %r3, 1; @%p3 ret;" + REMOTE_ARRIVAL
    with pytest.raises(EmulationError, match="which has exited"):
        for seed in range(20):
            run(body, blocks=2, cluster=2, seed=seed)


SEND = f"""
    xor.b32 %r7, %r3, 1;
    add.s32 %r8, %r1, {BARRIER};
    mapa.shared::cluster.u32 %r8, %r8, %r7;
    mapa.shared::cluster.u32 %r9, %r1, %r7;
    @%p0 mbarrier.arrive.expect_tx.shared::cluster.b64 _, [%r8], 4;
    @%p0 st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r9], %r4, [%r8];
"""
RECEIVE = """
    ld.shared.b32 %r10, [%r1];
    st.global.b32 [%rd4], %r10;
"""


@pytest.mark.parametrize("seed", ANY_ORDER)
def test_blocks_send_each_other_words(seed):
    out = run(INITIALISE + MEET + SEND + wait() + RECEIVE, blocks=4, cluster=2, seed=seed)
    assert (out.reshape(4, 128) == np.array([[1], [0], [3], [2]])).all()


def test_reading_a_word_without_having_waited_for_it_is_found():
    with pytest.raises(EmulationError, match=r"on its way|without having waited|never written"):
        run(INITIALISE + MEET + SEND + RECEIVE + wait() + LEAVE, blocks=2, cluster=2)


def test_a_word_is_sent_to_the_block_whose_barrier_it_signals():
    elsewhere = SEND.replace("mapa.shared::cluster.u32 %r9, %r1, %r7;", "mov.u32 %r9, %r1;")
    with pytest.raises(EmulationError, match="stores to block"):
        run(INITIALISE + MEET + elsewhere + wait(), blocks=2, cluster=2)


NEIGHBOUR = """
    shl.b32 %r10, %r0, 2;
    add.s32 %r8, %r1, %r10;
    st.shared.b32 [%r8], %r6;
    xor.b32 %r7, %r3, 1;
    mapa.shared::cluster.u32 %r9, %r8, %r7;
"""
READ_NEIGHBOUR = """
    ld.shared::cluster.b32 %r10, [%r9];
    st.global.b32 [%rd4], %r10;
"""
RELAXED_LEAVE = LEAVE.replace("arrive", "arrive.relaxed")


@pytest.mark.parametrize("seed", ANY_ORDER)
def test_blocks_read_each_others_memory(seed):
    out = run(NEIGHBOUR + LEAVE + READ_NEIGHBOUR + RELAXED_LEAVE, blocks=4, cluster=2, seed=seed)
    assert (out.reshape(4, 128) == np.arange(512).reshape(4, 128)[[1, 0, 3, 2]]).all()


@pytest.mark.parametrize("seed", ANY_ORDER)
def test_blocks_write_each_others_memory(seed):
    body = NEIGHBOUR + LEAVE + "st.shared::cluster.b32 [%r9], %r6;" + LEAVE
    body += "ld.shared.b32 %r10, [%r8]; st.global.b32 [%rd4], %r10;"
    out = run(body, blocks=4, cluster=2, seed=seed)
    assert (out.reshape(4, 128) == np.arange(512).reshape(4, 128)[[1, 0, 3, 2]]).all()


def test_writing_a_block_that_reads_on_its_own_is_found():
    write = "st.shared::cluster.b32 [%r9], %r6;"
    read = "ld.shared.b32 %r10, [%r8]; st.global.b32 [%rd4], %r10;"
    with pytest.raises(EmulationError, match=r"what another warp (reads|writes)"):
        for seed in range(20):
            run(NEIGHBOUR + LEAVE + write + read + LEAVE, blocks=2, cluster=2, seed=seed)


def test_reading_a_block_that_has_not_released_is_found():
    for meeting in ("", RELAXED_LEAVE):
        with pytest.raises(EmulationError, match=r"no barrier in between|never written"):
            run(NEIGHBOUR + meeting + READ_NEIGHBOUR + LEAVE, blocks=2, cluster=2)


def test_reading_a_block_that_has_exited_is_found():
    with pytest.raises(EmulationError, match="which has exited"):
        for seed in range(20):
            run(NEIGHBOUR + LEAVE + READ_NEIGHBOUR, blocks=2, cluster=2, seed=seed)


def test_writing_what_another_block_reads_is_found():
    again = "st.shared.b32 [%r8], %r0;"
    met = NEIGHBOUR + LEAVE + READ_NEIGHBOUR
    run(met + LEAVE + again, blocks=2, cluster=2)
    with pytest.raises(EmulationError, match=r"what another warp (reads|writes)"):
        for seed in range(20):
            run(met + again + LEAVE, blocks=2, cluster=2, seed=seed)


# mbarriers ----------------------------------------------------------------------------------


def test_phases_alternate():
    body = INITIALISE
    for phase in range(5):
        body += f"@%p0 mbarrier.arrive.shared.b64 %rd9, [%r1+{BARRIER}];" + wait(phase % 2)
        body += "bar.sync 0;"  # who comes two phases late does not see its own any more
    run(body + wait(1 - phase % 2 if phase % 2 else 0))


def test_a_phase_that_never_completes_is_a_deadlock():
    with pytest.raises(EmulationError, match="deadlock") as error:
        run(INITIALISE + load(1024) + wait(), words(16, 8), load_box=Box((8, 16)))
    assert "warp 3 of block 0 waits for the mbarrier at" in str(error.value)
    assert "phase 0: 0 of 1 arrivals and 512 bytes are missing" in str(error.value)


def test_waiting_for_the_wrong_parity_is_a_deadlock():
    with pytest.raises(EmulationError, match="deadlock"):
        arrive = f"@%p0 mbarrier.arrive.shared.b64 %rd9, [%r1+{BARRIER}];"
        run(INITIALISE + arrive + wait(1) + wait(0) + wait(1))


def test_a_wait_may_end_early():
    body = f"""{INITIALISE}
    mbarrier.try_wait.parity.shared.b64 %p3, [%r1+{BARRIER}], 0;
    selp.b32 %r9, 1, 0, %p3;
    st.global.b32 [%rd4], %r9;
    """
    assert (run(body) == 0).all()


def test_too_many_arrivals_are_found():
    arrive = f"@%p0 mbarrier.arrive.shared.b64 %rd9, [%r1+{BARRIER}], 2;"
    with pytest.raises(EmulationError, match="arrives 2 times"):
        run(INITIALISE + arrive)


def test_a_barrier_that_nobody_initialised_is_found():
    with pytest.raises(EmulationError, match="where none is initialised"):
        run(wait())


def test_a_barrier_used_before_others_know_of_it_is_found():
    body = INITIALISE.replace("bar.sync 0;", "") + wait(1)
    with pytest.raises(EmulationError, match=r"seen the initialisation|none is initialised"):
        run(body)


def test_a_barrier_without_a_fence_for_copies_is_found():
    body = INITIALISE.replace("fence.mbarrier_init.release.cluster;", "") + load(512) + wait()
    with pytest.raises(EmulationError, match="no fence behind its initialisation"):
        run(body, words(16, 8), load_box=Box((8, 16)))


# Races --------------------------------------------------------------------------------------


def test_reading_what_is_on_its_way_is_found():
    with pytest.raises(EmulationError, match=r"on its way|without having waited|never written"):
        run(INITIALISE + load(512) + EVERY_WORD, words(16, 8), load_box=Box((8, 16)))


def test_reading_without_having_seen_the_phase_is_found():
    some_wait = f"setp.eq.u32 %p3, %r2, 0; @!%p3 bra OVER; {wait()} OVER: nanosleep.u32 20;"
    found = set()
    for seed in range(20):
        with pytest.raises(EmulationError) as error:
            body = INITIALISE + load(512) + some_wait + EVERY_WORD
            run(body, words(16, 8), load_box=Box((8, 16)), seed=seed)
        found.add(str(error.value).split("'")[2].split("(")[0].split(", at")[0].strip())
    assert "reads what an asynchronous copy wrote, without having waited for its mbarrier" in found


def test_a_copy_over_what_others_still_read_is_found():
    body = INITIALISE + load(512) + wait() + EVERY_WORD + load(512) + wait(1)
    with pytest.raises(EmulationError, match="writes what another warp reads"):
        run(body, words(16, 8), load_box=Box((8, 16)))
    body = INITIALISE + load(512) + wait() + EVERY_WORD + "bar.sync 0;" + load(512) + wait(1)
    with pytest.raises(EmulationError, match="was read without fence"):
        run(body, words(16, 8), load_box=Box((8, 16)))
    run(body.replace("bar.sync 0;", FENCE + "bar.sync 0;"), words(16, 8), load_box=Box((8, 16)))


@pytest.mark.parametrize(
    ("left_out", "message"),
    [
        (FENCE, "without fence.proxy.async"),
        ("bar.sync 0;", "what another warp writes|never written"),
        (DRAIN, "exits while a bulk store reads"),
    ],
)
def test_what_a_bulk_store_needs_is_not_left_out(left_out, message):
    body = WRITE_SHARED + FENCE + "bar.sync 0;" + store() + DRAIN
    with pytest.raises(EmulationError, match=message):
        run(body.replace(left_out, ""), output=np.zeros((16, 8), np.uint32), store_box=Box((8, 16)))


@pytest.mark.parametrize("seed", ANY_ORDER)
def test_a_warp_meets_behind_what_one_of_its_threads_waits_for(seed):
    only_first = "@!%p0 bra BEHIND;" + store() + DRAIN + "BEHIND:"
    body = WRITE_SHARED + FENCE + "bar.sync 0;" + only_first + "bar.warp.sync -1;"
    out = run(body, output=np.zeros((16, 8), np.uint32), store_box=Box((8, 16)), seed=seed)
    assert (out.reshape(-1) == np.arange(128)).all()


def test_writing_what_a_bulk_store_reads_is_found():
    body = WRITE_SHARED + FENCE + "bar.sync 0;" + store() + "bar.sync 0;" + WRITE_SHARED + DRAIN
    with pytest.raises(EmulationError, match="writes what a bulk store still reads"):
        run(body, output=np.zeros((16, 8), np.uint32), store_box=Box((8, 16)))


def test_writing_over_an_mbarrier_is_found():
    with pytest.raises(EmulationError, match="writes over an mbarrier"):
        run(INITIALISE + f"st.shared.b32 [%r1+{BARRIER}], 0;")


READ_FIRST = "ld.shared.b32 %r9, [%r1]; mov.u32 %r10, %r9;"


def test_races_between_warps_are_found():
    body = "@%p0 st.shared.b32 [%r1], 7; bar.sync 0;" + READ_FIRST
    run(body)
    with pytest.raises(EmulationError, match=r"what another warp writes|never written|warp reads"):
        run(body.replace("bar.sync 0;", ""))


def test_named_barriers_order_only_who_takes_part():
    body = """
        @%p0 st.shared.b32 [%r1], 7;
        setp.lt.u32 %p3, %r2, 2;
        @%p3 bar.sync 1, 64;
    """
    run(body + READ_FIRST.replace("ld", "@%p3 ld").replace("mov", "@%p3 mov"))
    with pytest.raises(EmulationError, match=r"what another warp writes|never written|warp reads"):
        run(body + READ_FIRST)


def test_arriving_at_a_named_barrier_does_not_wait():
    body = """
        setp.eq.u32 %p3, %r2, 0;
        @%p3 st.shared.b32 [%r1], 7;
        @%p3 bar.arrive 1, 128;
        @!%p3 bar.sync 1, 128;
        @!%p3 ld.shared.b32 %r9, [%r1];
    """
    run(body.replace("@%p3 st", "@%p0 st"))


def test_a_barrier_that_some_leave_out_is_a_deadlock():
    with pytest.raises(EmulationError, match="barrier 1 of 128 threads"):
        run("setp.lt.u32 %p3, %r2, 3; @%p3 bar.sync 1, 128;")


# Global memory between blocks -----------------------------------------------------------------

SUM_UP = """
    setp.eq.u32 %p3, %r4, 0;
    @%p0 atom.global.add.u32 %r9, [%rd1], 1;
"""


@pytest.mark.parametrize("seed", ANY_ORDER)
def test_atomics_of_blocks_add_up(seed):
    assert run(SUM_UP, blocks=5, scratch=True, seed=seed)[0] == 5


FLAG = """{
    @!%p0 bra OVER;
    setp.eq.u32 %p3, %r4, 0;
    @!%p3 bra READ;
    st.global.b32 [%rd1+4], 9;
    fence.acq_rel.gpu;
    atom.global.exch.b32 %r9, [%rd1], 1;
    bra OVER;
    READ:
    ld.relaxed.gpu.global.b32 %r9, [%rd1];
    setp.eq.u32 %p4, %r9, 1;
    @!%p4 bra READ;
    fence.acq_rel.gpu;
    ld.global.b32 %r10, [%rd1+4];
    st.global.b32 [%rd1+8], %r10;
    OVER:
    }"""


@pytest.mark.parametrize("seed", ANY_ORDER)
def test_a_flag_with_fences_hands_data_over(seed):
    assert run(FLAG, blocks=2, scratch=True, seed=seed)[2] == 9


@pytest.mark.parametrize("which", [0, 1])
def test_a_flag_without_a_fence_is_found(which):
    parts = FLAG.split("fence.acq_rel.gpu;")
    body = "fence.acq_rel.gpu;".join(parts[: 1 + which]) + parts[1 + which]
    body += "fence.acq_rel.gpu;" + parts[2] if which == 0 else ""
    assert body.count("fence") == 1
    with pytest.raises(EmulationError, match="nothing orders them"):
        run(body, blocks=2, scratch=True)


def test_an_atomic_that_acquires_and_releases_needs_no_fence():
    body = FLAG.replace("fence.acq_rel.gpu;", "")
    body = body.replace("atom.global.exch", "atom.global.acq_rel.exch")
    body = body.replace(
        "ld.relaxed.gpu.global.b32 %r9, [%rd1]", "atom.acq_rel.gpu.global.or.b32 %r9, [%rd1], 0"
    )
    assert run(body, blocks=2, scratch=True)[2] == 9
    with pytest.raises(EmulationError, match="nothing orders them"):
        run(body.replace("acq_rel.exch", "relaxed.exch"), blocks=2, scratch=True)


def test_waiting_for_a_flag_that_nobody_sets_ends():
    with pytest.raises(EmulationError, match="caught in a loop"):
        run(
            FLAG.replace("exch.b32 %r9, [%rd1], 1", "exch.b32 %r9, [%rd1], 2"),
            blocks=2,
            scratch=True,
        )


# Registers ------------------------------------------------------------------------------------


def test_setmaxnreg_needs_registers_that_others_give_back():
    body = """
        setp.lt.u32 %p3, %r2, 4;
        @%p3 bra FIRST;
        setmaxnreg.inc.sync.aligned.u32 232;
        bra OVER;
        FIRST:
        setmaxnreg.dec.sync.aligned.u32 40;
        OVER:
        nanosleep.u32 20;
    """
    run(body, threads=384)
    with pytest.raises(EmulationError, match=r"waits for .* registers of its block"):
        run(body.replace("dec.sync.aligned.u32 40", "dec.sync.aligned.u32 104"), threads=384)


WORD_OUT = "st.global.b32 [%rd4], %r0;"
LAUNCHED = "griddepcontrol.wait;"


def test_nothing_is_accessed_before_what_earlier_kernels_wrote():
    out = run(LAUNCHED + WORD_OUT)
    assert (out == np.arange(len(out))).all()
    with pytest.raises(EmulationError, match=r"in front of griddepcontrol\.wait"):
        run(WORD_OUT + LAUNCHED)


WORD_IN = "ld.global.b32 %r0, [%rd0];"


def test_inputs_are_there_behind_a_kernel_of_the_same_call():
    body = WORD_IN + LAUNCHED + WORD_OUT
    assert (run(body, np.full(128, 7, np.uint32), has_inputs=True) == 7).all()
    with pytest.raises(EmulationError, match=r"in front of griddepcontrol\.wait"):
        run(body)


@pytest.mark.parametrize("early", [WORD_OUT, "ld.global.b32 %r0, [%rd1];"])
def test_what_kernels_of_a_call_write_is_not_there_before_they_are_awaited(early):
    with pytest.raises(EmulationError, match=r"in front of griddepcontrol\.wait"):
        run(early + LAUNCHED + WORD_OUT, scratch=True, has_inputs=True)


def test_inputs_come_by_bulk_copies_as_well():
    body = INITIALISE + load(512) + LAUNCHED + wait() + "ld.shared.b32 %r0, [%r1];" + WORD_OUT
    box = {"load_box": Box((128, 1))}
    rows = np.full((1, 128), 7, np.uint32)
    assert (run(body, rows, has_inputs=True, **box) == 7).all()
    with pytest.raises(EmulationError, match=r"in front of griddepcontrol\.wait"):
        run(body, rows, **box)


def test_the_next_kernel_begins_behind_the_wait():
    begin = "griddepcontrol.launch_dependents;"
    run(LAUNCHED + begin + WORD_OUT)
    with pytest.raises(EmulationError, match="lets the next kernel begin"):
        run(begin + LAUNCHED + WORD_OUT)
