"""What the performance model knows of GPUs: constants per GPU and kernel family, in ``model.json``.

``benchmarks/fit_model.py`` finds them, and ``benchmarks/fit_grouped.py`` those of groups of rows.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from kernel_api.devices import gpu_name_of, most_multiprocessors

CONSTANTS = Path(__file__).with_name("model.json")


@dataclass(frozen=True, eq=False)
class Constants:
    """Of one kernel family on one GPU; seconds, bytes, and operations (a product and sum are 2).

    Attributes:
        multiprocessors: Of the GPU.
        bandwidth: Bytes per second of device memory.
        l2_bandwidth: Bytes per second that all multiprocessors together read from L2.
        crossing: Of the time that an operand takes to arrive, what it takes longer where many
            clusters read it: each half of L2 has it from the other one.
        near: Of the time that the larger operand takes to come from L2, what the smaller one does
            that very many clusters read: both halves of L2 soon have it.
        at_once: Of what L2 could send once to blocks without clusters of one tile, what it does.
        l2_bytes: What L2 keeps from one visit of the tiles around to the next.
        sustained: Operations per second of the whole GPU that its power allows, by kind.
        spared: Of that, what a schedule reaches with the same power whose tiles have rows for more
            than one instruction.
        alone: Of groups' time, what blocks without a cluster take where many load the same columns:
            at one time, and so once, if they begin on a GPU that is empty, but not between the
            kernels of a layer, which say how much longer.
        overhead: Seconds of a launch that does nothing.
        latency: Seconds from the request of a stage to its arrival.
        held: Stages that are not on their way, because the consumers have them.
        rate: Operations per second of one multiprocessor's tensor cores, by kind.
        share: Of that rate, what a schedule reaches.
        in_turn: Of the time of a step, what two tiles in turn take where the blocks of a cluster
            share rows of A.
        feed: Bytes per second that one multiprocessor reads from shared memory.
        arrival: Bytes that it reads in the time in which one arrives there.
        load: Bytes per second that one multiprocessor takes from L2.
        straddling: Of the time of a load, and of L2's, what rows take that begin within a line.
        split_rows: Of L2's time, what such rows take that lie along M or N, unless those that read
            the same k tile do so at one time.
        short_rows: Of the time of a load, what it takes of tiles that are no multiples of 128 bytes
            along their columns, by the most bytes that divide them.
        long_steps: Of the time in which device memory is read, what it takes if a step along K has
            256 bytes of a row or more: neighbours lie in one page of it.
        step: Seconds that a step along K waits beside its work, with each block of columns.
        promotion: Seconds in which a group adds up what it has multiplied of a column with one
            instruction's K; 0 where the tensor cores do.
        store: Bytes per second at which one multiprocessor writes a tile of out.
        narrow: Of the time in which a tile is written, what it takes in subtiles of fewer columns,
            because it has no whole number of those of 32.
        epilogue: Seconds of an epilogue beside that.
        late: Bytes of out that are written in the time in which an epilogue reads one where a
            consumer with two blocks of rows has no registers to read ahead.
        handover: Seconds until the CTA that adds up partial sums knows that all are there.
        seam: The same of tiles that are cut anywhere, whose parts are not ready at one time.
        meeting: Seconds that CTAs of a cluster wait for each other, which add up partial sums in
            their shared memory.
        crowd: Seconds that they wait longer where most multiprocessors have such clusters.
        behind: Seconds that a kernel takes which is launched behind to add up partial sums.
        summed: Bytes of them per second that all multiprocessors together write and read.
        pieces: Bytes per second that all multiprocessors together write in pieces, beyond what
            writing them takes otherwise.
        sharpness: Power in which the times of parts that overlap are added up.
    """

    multiprocessors: int
    bandwidth: float
    l2_bandwidth: float
    crossing: float
    near: float
    at_once: float
    l2_bytes: float
    sustained: dict[str, float]
    spared: dict[str, float]
    alone: float
    overhead: float
    latency: float
    held: float
    rate: dict[str, float]
    share: dict[str, float]
    in_turn: float
    feed: float
    arrival: float
    load: float
    straddling: float
    split_rows: float
    short_rows: dict[str, float]
    long_steps: float
    step: float
    promotion: float
    store: float
    narrow: float
    epilogue: float
    late: float
    handover: float
    seam: float
    meeting: float
    crowd: float
    behind: float
    summed: float
    pieces: float
    sharpness: float

    @classmethod
    def of(cls, table: dict[str, Any], family: str) -> Constants:
        """From what the file says of one GPU.

        A family that it does not name has the constants of the one that its name begins with, or
        else of the first one of its architecture. A family's own go before the machine's.
        """
        families = table["families"]
        architecture = family.partition(".")[0]
        near = next((name for name in families if name.startswith(f"{architecture}.")), None)
        known = max(filter(family.startswith, families), key=len, default=near)
        own = families[known or next(iter(families))]
        values = {**table["machine"], **own}
        return cls(**{field.name: values[field.name] for field in dataclasses.fields(cls)})


@lru_cache(maxsize=256)
def constants(family: str, gpu: str | None = None, most: int | None = None) -> Constants:
    """The constants of a kernel family on a GPU; by default on the first one of the file.

    most: Multiprocessors that kernels share their work among, if others have some.
    """
    found = Constants.of(table_of(json.loads(CONSTANTS.read_text()), gpu), family)
    if most is None or most >= found.multiprocessors:
        return found
    return dataclasses.replace(found, multiprocessors=most)


def constants_on(device: Any, family: str) -> Constants:
    """Those of a tensor's device, and without a GPU those of the first one of the file."""
    return constants(family, gpu_name_of(device), most_multiprocessors())


def table_of(tables: dict[str, Any], gpu: str | None) -> dict[str, Any]:
    """What a file says of a GPU, the first one by default.

    Of one that is like another but for some constants, ``shares`` says what it has of those, and
    ``families`` which are its own.
    """
    found: dict[str, Any] = tables.get(gpu or "") or next(iter(tables.values()))
    if "like" not in found:
        return found
    table: dict[str, Any] = copy.deepcopy(tables[found["like"]])
    for values in (table["machine"], *table["families"].values()):
        for name, share in found["shares"].items():
            if name in values:
                values[name] *= share
    for family, own in found["families"].items():
        table["families"][family].update(own)
    return table
