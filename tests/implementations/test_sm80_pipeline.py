"""The main loop of the Ampere GEMM: every multiplication gets its own tile, however threads run.

The loop itself is compiled for the CPU, where it writes down what it does, in order. Reading that,
a model of shared memory holds what one thread wrote back from the others until a barrier.
"""

from collections import Counter
from enum import IntEnum, auto
from functools import cache

import cutlass
import cutlass.cute as cute
import numpy as np
import pytest
from cutlass import Float32, Int32
from on_the_cpu import fixed
from sm80_gemms import distinct, offered, planned

from kernel_api.implementations.sm80.gemm import Gemm


class Event(IntEnum):
    """What the log holds; in brackets the three integers beside it."""

    START = auto()  # tile, stage, part
    FINISH = auto()  # stage, part, 0
    COMMIT = auto()
    WAIT = auto()  # groups that may be in flight, 0, 0
    BARRIER = auto()
    READ = auto()  # block of K, stage, 0
    MULTIPLY = auto()  # block of K, 0, 0


class LoggedGemm(Gemm):
    """Its main loop only: every step becomes a line of a log. Line 0 counts the others."""

    @cute.jit
    def run(self, log: cute.Tensor, size_k: Int32):
        self.log = log
        with pytest.MonkeyPatch.context() as patch:
            for function, event in (
                ("cp_async_commit_group", Event.COMMIT),
                ("cp_async_wait_group", Event.WAIT),
                ("sync_threads", Event.BARRIER),
            ):
                patch.setattr(cute.arch, function, self._noting(event))
            self._main_loop(None, None, None, None, size_k)

    def _noting(self, event):
        return lambda *values: self._note(event, *values)

    @cute.jit
    def _note(self, event: cutlass.Constexpr, first=0, second=0, third=0):
        line = self.log[0, 0] + 1
        self.log[0, 0] = line
        self.log[line, 0] = int(event)
        self.log[line, 1], self.log[line, 2], self.log[line, 3] = first, second, third

    def _start(self, sources, k_tile, stage, part):
        self._note(Event.START, k_tile, stage, part)
        return ()

    def _finish(self, sources, stage, part, pending):
        self._note(Event.FINISH, stage, part)

    def _read(self, fragments, k, stage):
        self._note(Event.READ, k, stage)

    def _multiply(self, tiled_mma, accumulators, fragments, k):
        self._note(Event.MULTIPLY, k)


@cache
def compiled(gemm):
    """The main loop with the stages of a GEMM, be they too few, and a log to run it with."""
    logged = LoggedGemm(
        gemm.tile_shape, gemm.warps, 3, gemm.accumulator_type, vector_bytes=gemm.vector_bytes
    )
    logged.stages = gemm.stages
    logged._plan(gemm.operand_type, gemm.D.element_type, (1, 1, 1))
    log = np.zeros((2048, 4), np.int32)
    return cute.compile(logged.run, fixed(log), Int32(0)), log


def events_of(gemm, size_k):
    """What the main loop does for a size of K, in order: (event, integer, integer, integer)."""
    main_loop, log = compiled(gemm)
    log[:] = 0
    main_loop(fixed(log), Int32(size_k))
    return [(Event(event), *values) for event, *values in log[1 : log[0, 0] + 1].tolist()]


class SharedMemory:
    """The stages of a block whose threads are only kept in step by barriers."""

    def __init__(self, gemm):
        self.asynchronous, self.parts = gemm.A.asynchronous, gemm.A.parts
        self.barriers = 0
        self.visible = [{} for _ in range(gemm.stages)]  # part → tile
        self.last_read = [-1] * gemm.stages  # how many barriers had been then
        self.started = {}  # (stage, part) → tile, in this and the next three
        self.uncommitted = {}
        self.groups = []  # of copies in flight
        self.landed = {}  # seen by the thread that copied, not yet by the others
        self.fragments = {}  # block of K → tile
        self.multiplied = []  # (tile, block of K)

    def replay(self, events):
        for event, *values in events:
            getattr(self, event.name.lower())(*values)

    def start(self, tile, stage, part):
        self.started[stage, part] = tile
        if self.asynchronous:
            self._overwrite(stage, part)
            self.uncommitted[stage, part] = tile

    def finish(self, stage, part, _):
        if not self.asynchronous:
            self._overwrite(stage, part)
            self.landed[stage, part] = self.started[stage, part]

    def _overwrite(self, stage, part):
        assert self.last_read[stage] < self.barriers, f"stage {stage} may still be read"
        self.visible[stage].pop(part, None)

    def commit(self, *_):
        self.groups.append(self.uncommitted)
        self.uncommitted = {}

    def wait(self, in_flight, *_):
        while len(self.groups) > in_flight:
            self.landed.update(self.groups.pop(0))

    def barrier(self, *_):
        self.barriers += 1
        for (stage, part), tile in self.landed.items():
            self.visible[stage][part] = tile
        self.landed = {}

    def read(self, k, stage, _):
        assert len(self.visible[stage]) == self.parts, f"stage {stage} is not complete"
        (self.fragments[k],) = set(self.visible[stage].values())
        self.last_read[stage] = self.barriers

    def multiply(self, k, *_):
        self.multiplied.append((self.fragments[k], k))


def name(gemm):
    way = "asynchronous" if gemm.A.asynchronous else "registers"
    return f"stages{gemm.stages}-blocks{gemm.k_blocks}-{way}"


OTHERS = [
    *(planned((32, 32, tile_k), (2, 2), stages) for stages in (2, 3, 7) for tile_k in (32, 128)),
    *(planned((32, 32, tile_k), (2, 2), stages, 2) for stages in (3, 5) for tile_k in (32, 128)),
    planned((32, 32, 32), (2, 2), 2, 4, operand_type=Float32),
]

every_pipeline = pytest.mark.parametrize("gemm", distinct([*offered(), *OTHERS], name), ids=name)


@every_pipeline
@pytest.mark.parametrize("k_tiles", [0, 1, 2, 3, 5, 17])
def test_every_block_of_every_tile_is_multiplied_once_and_in_order(gemm, k_tiles):
    memory = SharedMemory(gemm)
    memory.replay(events_of(gemm, k_tiles * gemm.tile_shape[2]))
    assert memory.multiplied == [(tile, k) for tile in range(k_tiles) for k in range(gemm.k_blocks)]


@every_pipeline
def test_a_last_tile_that_is_not_whole_is_a_tile(gemm):
    tile_k = gemm.tile_shape[2]
    whole = events_of(gemm, 3 * tile_k)
    assert events_of(gemm, 2 * tile_k + 1) == whole
    assert events_of(gemm, 3 * tile_k - 1) == whole


@every_pipeline
def test_there_is_one_barrier_before_the_first_tile_and_one_for_each(gemm):
    counts = Counter(event for event, *_ in events_of(gemm, 5 * gemm.tile_shape[2]))
    assert counts[Event.BARRIER] == 1 + 5
    assert counts[Event.COMMIT] == (gemm.stages - 1 + 5 if gemm.A.asynchronous else 0)


# The model finds what a pipeline could do wrong -------------------------------------------------


@pytest.fixture(scope="module")
def asynchronous():
    gemm = planned((32, 32, 64), (2, 2), 3)
    return gemm, events_of(gemm, 5 * 64)


@pytest.mark.parametrize(
    ("event", "problem"),
    [
        (Event.BARRIER, "may still be read|not complete"),
        (Event.WAIT, "not complete"),
        (Event.COMMIT, "not complete"),
    ],
    ids=str,
)
def test_no_barrier_wait_or_group_can_be_left_out(asynchronous, event, problem):
    gemm, events = asynchronous
    for i in [i for i, (found, *_) in enumerate(events[:-20]) if found is event]:
        with pytest.raises(AssertionError, match=problem):
            SharedMemory(gemm).replay(events[:i] + events[i + 1 :])


def test_two_stages_are_not_enough_for_operands_that_go_through_registers():
    with pytest.raises(ValueError, match="vectors of 2 bytes need 3 stages or more, not 2"):
        planned((32, 32, 64), (2, 2), 2, 2)
    gemm = planned((32, 32, 64), (2, 2), 3, 2)
    gemm.stages = 2
    with pytest.raises(AssertionError, match=r"may still be read|not complete"):
        SharedMemory(gemm).replay(events_of(gemm, 5 * 64))
