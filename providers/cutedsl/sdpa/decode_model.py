"""How long attention of few queries takes, to rank designs."""

from __future__ import annotations

import math
from typing import Any

from kernel_api.providers.cutedsl.sdpa.model import (
    MULTIPROCESSORS,
    biased,
    blocks_seen,
    choose,
    loaded,
    longest,
    queries_of,
    row_tiles,
    seen,
)

#: Bytes per second that keys and values are read with, and seconds that nothing hides: where parts
#: go through the workspace, or there are none.
_READ, _ALONE_BY_WORKSPACE = 4.3e12, 3.0e-6
#: Of clusters. Seconds that nothing hides, by columns of Q and K; bytes per second that all
#: multiprocessors together are given from memory, and one of them from L2, by whether tiles have
#: parts.
_ALONE_IN_CLUSTERS = {64: 2.75e-6, 128: 3.17e-6}
_READ_IN_CLUSTERS, _READ_BY_ONE = {False: 4.25e12, True: 4.05e12}, {False: 67e9, True: 44.5e9}
#: Seconds of a block of keys, by columns of Q and K: of one block of threads on a multiprocessor,
#: and where these come one after the other; and of how each begins and ends.
_BLOCK_OF_KEYS = {64: (0.43e-6, 0.42e-6), 128: (0.575e-6, 0.466e-6)}
_BEGIN_OF_128 = 1.1e-6
#: Seconds in which 64 rows of 128 columns of all parts are added up; and where clusters of several
#: blocks ask for nearly all multiprocessors, those of any tile, and of such rows.
_ADD_UP, _FULL, _ADD_UP_FULL = 3.05e-6, 1.04e-6, 1.46e-6
_LARGE, _NEARLY_ALL = 4, 100
#: Of a tile with parts for the largest clusters: seconds that these lose until they have read some
#: blocks of keys each.
_MOST_OF_A_TILE, _LOST, _UNTIL = 16, 5.8e-6, 16
#: Of parts whose keys are in pages: what each of as many blocks of keys takes longer.
_IN_PAGES = 0.2e-6
#: Vectors of a tile that are added up in the time that is counted for all, and of each further
#: one the seconds, for any number of parts and for each. Measured on an H100.
_FEW_VECTORS, _VECTOR, _VECTOR_OF_A_PART = 128, 5e-9, 0.6e-9


def _adding_up(rows: int, columns: int, parts: float) -> float:
    """Seconds that the block takes which comes last of a tile, beyond those of few rows."""
    if parts <= 1:
        return 0.0
    further = max(rows * columns / 8 - _FEW_VECTORS, 0.0)
    return further * (_VECTOR + parts * _VECTOR_OF_A_PART)


def _parts(tiles: int, blocks: int, room: int) -> float:
    """That each of some tiles is cut into, of so many blocks of keys."""
    return min(blocks, max(room // max(tiles, 1), 1))


def decode_seconds(args: Any, design: Any) -> float:
    """Of few queries: keys and values are read once per tile of rows."""
    if args.is_packed:
        return _of_packed(args, design)
    found = _in_clusters(args, design) if design.cluster > 1 else _by_workspace(args, design)
    (rows_of_tile, keys), group = design.tile_shape, _group(args)
    met = _tiles(args, design) * blocks_seen(args, -(-rows_of_tile // group), keys)
    found = max(found, met * loaded(args, keys) / MULTIPROCESSORS)
    # A bias that is read where it lies takes as long as its rows are many.
    rows = min(args.S_q * _group(args) / design.tile_shape[0], 1.0)
    return float(found * (1 + rows * (biased(args, design) - 1)))


#: Of packed sequences: seconds until they are scheduled and sums are there, the time that tiles
#: take over that where blocks are in clusters, of which a multiprocessor has two, and seconds that
#: nothing hides in those. Measured on an H100.
_SCHEDULE, _SCHEDULED, _ALONE_IN_PACKED = 12e-6, 1.15, 4.1e-6


def _of_packed(args: Any, design: Any) -> float:
    """Parts are of about as many keys each, so all multiprocessors have as much to do."""
    from kernel_api.implementations.sm90 import sdpa_split

    (most, keys), group = design.tile_shape, _group(args)
    of_tile = (design.tile_shape, design.head_dim, args.K.dtype.itemsize, args.S_q * group)
    costs = sdpa_split.costs_of(*of_tile, 1, choose)
    tiles = max(_tiles(args, design), 1)
    each = max(tiles // max(args.H_kv * args.B, 1), 1)
    met = tiles * blocks_seen(args, -(-most // group), keys) / MULTIPROCESSORS
    found = 1e-9 * (
        max(met * costs.block, met * costs.read / each) + tiles * costs.tile / MULTIPROCESSORS
    )
    if design.cluster > 1:
        return float(_ALONE_IN_PACKED + found)
    return float(_ALONE_BY_WORKSPACE + _SCHEDULE + _SCHEDULED * found)


def _by_workspace(args: Any, design: Any) -> float:
    """Of as many parts as the kernel makes."""
    from kernel_api.implementations.sm90 import sdpa_split

    (most, keys), group = design.tile_shape, _group(args)
    rows, tiles = args.S_q * group, max(_tiles(args, design), 1)
    row_blocks = max(tiles // max(args.H_kv * args.B, 1), 1)
    size = sdpa_split.Size(tiles, row_blocks, -(-args.S_kv // keys), MULTIPROCESSORS)
    of_tile = (design.tile_shape, design.head_dim, args.K.dtype.itemsize, rows)
    costs = sdpa_split.costs_of(*of_tile, 1, choose)
    parts = sdpa_split.parts_of(size, costs, choose)
    met = blocks_seen(args, -(-most // group), keys)
    if tiles * parts <= MULTIPROCESSORS:
        met = longest(args, size.blocks, met)
    found = sdpa_split.nanoseconds(parts, size._replace(blocks=math.ceil(met)), costs, choose)
    if not sdpa_split.are_many(rows, most, design.head_dim[1], choose):
        found += 1e9 * _adding_up(min(rows, most), design.head_dim[1], parts)
    queries = queries_of(args) * (args.D + args.D_v) * args.Q.dtype.itemsize
    return float(_ALONE_BY_WORKSPACE + 1e-9 * found + queries / _READ)


def _group(args: Any) -> int:
    """Rows of a query that share a head of keys."""
    return max(int(args.H // max(args.H_kv, 1)), 1)


def _tiles(args: Any, design: Any) -> int:
    """Of all heads of keys."""
    return int(args.H_kv * row_tiles(args, design.tile_shape[0], _group(args)))


def _in_clusters(args: Any, design: Any) -> float:
    """Of as many parts as the kernel makes."""
    from kernel_api.implementations.sm90 import sdpa_split

    (most_rows, keys), columns = design.tile_shape, design.head_dim[0]
    group, tiles = _group(args), max(_tiles(args, design), 1)
    size = sdpa_split.Size(tiles, 1, -(-args.S_kv // keys), MULTIPROCESSORS)
    parts = sdpa_split.parts_in_clusters(size, design.cluster, 1, choose)
    blocks, each = tiles * parts, math.ceil(size.blocks / parts)
    met = blocks_seen(args, -(-most_rows // group), keys)
    of_keys = args.D + args.D_v
    keys_read = min(args.B * args.H_kv * size.blocks, tiles * met) * keys
    found = keys_read * of_keys * args.K.dtype.itemsize / _READ_IN_CLUSTERS[parts > 1]
    by_one = keys * sum(design.head_dim) * args.K.dtype.itemsize / _READ_BY_ONE[parts > 1]
    alone, in_turn = _BLOCK_OF_KEYS[columns]
    if blocks <= MULTIPROCESSORS:
        found = max(found, min(each, longest(args, size.blocks, met)) * max(by_one, alone))
    else:
        begin, of_each = _BEGIN_OF_128 * columns / 128, met / parts
        of_one = max(begin + of_each * in_turn, of_each * by_one)
        found = max(found, blocks / MULTIPROCESSORS * of_one)
    if parts > 1:
        rows = min(args.S_q * group, most_rows) / 64 * columns / 128
        found += _ADD_UP * rows
        if blocks >= _NEARLY_ALL and sdpa_split.cluster_of(parts, design.cluster, choose) >= _LARGE:
            found += _FULL + _ADD_UP_FULL * rows
        if parts >= _MOST_OF_A_TILE:
            found += _LOST * min(each, _UNTIL) / _UNTIL
        elif args.is_paged:
            found += _IN_PAGES * min(each, _UNTIL)
    queries = queries_of(args) * of_keys * args.Q.dtype.itemsize
    return float(_ALONE_IN_CLUSTERS[columns] + found + queries / _READ)


#: Of 8-bit floats, by blocks that share a multiprocessor: seconds that nothing hides, those of
#: every further tile of a multiprocessor, and what is saved where no part has a second block of
#: keys. Measured on an H100.
_ALONE_FP8 = {1: (7.5e-6, 2.6e-6, 0.0), 2: (8.3e-6, 0.0, 1.8e-6)}
#: Of a multiprocessor, however often keys are read: seconds per key of a tile, and per column.
_KEY_FP8, _COLUMN_FP8 = 11e-9, 44e-12


def decode_fp8_seconds(args: Any, design: Any) -> float:
    """Of few queries to keys of 8-bit floats."""
    rows, heads = args.S_q * _group(args), args.H_kv * args.B
    tiles, keys = _tiles(args, design), args.S_kv * seen(args)
    alone, further, saved = _ALONE_FP8[design.resident]
    read = tiles * keys * (args.D + args.D_v) * args.K.dtype.itemsize / _READ
    blocks = -(-keys // design.tile_shape[1])
    if tiles * blocks <= MULTIPROCESSORS * design.resident:
        alone -= saved
    parts = _parts(tiles, math.ceil(blocks), MULTIPROCESSORS * design.resident)
    alone += _adding_up_fp8(design, rows, tiles, parts)
    of_key = max(_KEY_FP8, _COLUMN_FP8 * (args.D + args.D_v))
    multiplied = tiles * keys * of_key / MULTIPROCESSORS if tiles > heads else 0.0
    return float(alone + further * max(tiles / MULTIPROCESSORS - 1, 0.0) + max(read, multiplied))


def _adding_up_fp8(design: Any, rows: int, tiles: int, parts: float) -> float:
    """Seconds beyond those of few rows, by who comes last of a tile or by a kernel behind."""
    from kernel_api.implementations.sm90 import sdpa_split

    (most, _), (_, columns) = design.tile_shape, design.head_dim
    if parts <= 1 or not sdpa_split.are_many(rows, most, columns, choose):
        return _adding_up(min(rows, most), columns, parts)
    few, many = (
        sdpa_split.costs_of(design.tile_shape, design.head_dim, 1, n, design.resident, choose)
        for n in (1, rows)
    )
    return float(1e-9 * (many.sums - few.sums + tiles * parts * many.part))


#: Of latent vectors: seconds that nothing hides, of a block of keys on a multiprocessor, and of
#: sums of the parts that all multiprocessors together have, of 64 rows each.
_ALONE_LATENT, _LATENT_BLOCK, _LATENT_SUMS = 7e-6, 2.0e-6, 9e-6


def latent_seconds(args: Any, design: Any) -> float:
    """Of few queries whose values are columns of the keys, which are read once per tile of rows."""
    rows, heads = args.S_q * _group(args), args.H_kv * args.B
    most, keys = design.tile_shape
    tiles, seen_keys = _tiles(args, design), args.S_kv * seen(args)
    multiplied = tiles * seen_keys / keys * _LATENT_BLOCK / MULTIPROCESSORS
    read = heads * seen_keys * args.D * args.K.dtype.itemsize / _READ
    parts = min(tiles * seen_keys / keys, MULTIPROCESSORS) if tiles < MULTIPROCESSORS else 0
    sums = _LATENT_SUMS * parts / MULTIPROCESSORS * min(rows, most) / most
    return float(_ALONE_LATENT + max(multiplied, read) + sums)
