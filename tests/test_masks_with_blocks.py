"""The tables of blocks that masks show something of."""

import itertools

import pytest
import torch
from support.sdpa import Draw
from torch._subclasses import FakeTensorMode
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import kernel_api as ka
from kernel_api import epilogue as ep
from kernel_api import masks
from kernel_api.errors import ArgumentError, DeviceError
from kernel_api.masks import BlockSparse, Causal, MaskMod, Padding, SlidingWindow, with_blocks

IDS = torch.tensor([0] * 9 + [1] * 3 + [2] * 19 + [3] * 22, dtype=torch.int32)
IDS_OF_EACH = torch.stack([IDS, IDS.flip(0), (IDS * 7) % 3])
REACH = torch.tensor([0, 3, 40, 11])
TABLE = torch.rand(2, 4, generator=torch.Generator().manual_seed(3)) < 0.4


def document(b, h, q, kv, ids):
    return ids[q] == ids[kv]


def document_of_each(b, h, q, kv, ids):
    return ids[b, q] == ids[b, kv]


def near(b, h, q, kv, reach):
    return ep.maximum(q - kv, kv - q) <= reach[h]


def chosen(b, h, q, kv, table):
    return table[b, h] & ((q + kv) // 16 % 2 == 0)


def tenths(b, h, q, kv):
    return (kv - q) * 0.1 <= 0.8


#: Masks, whether they look at b and h, and the same of single pairs; d is how many keys there are
#: more than queries.
CASES = {
    "all": (SlidingWindow(None, None), "", lambda b, h, i, j, d: True),
    "causal": (Causal(), "", lambda b, h, i, j, d: j <= i),
    "causal, bottom right": (Causal("bottom_right"), "", lambda b, h, i, j, d: j <= i + d),
    "window": (SlidingWindow(5, 2), "", lambda b, h, i, j, d: i - 5 <= j <= i + 2),
    "window, bottom right": (
        SlidingWindow(5, 2, "bottom_right") & Causal("bottom_right"),
        "",
        lambda b, h, i, j, d: i + d - 5 <= j <= i + d,
    ),
    "far": (SlidingWindow(2**70, 2**70, "bottom_right"), "", lambda b, h, i, j, d: True),
    "document": (MaskMod(document, ids=IDS), "", lambda b, h, i, j, d: IDS[i] == IDS[j]),
    "document of each": (
        MaskMod(document_of_each, ids=IDS_OF_EACH),
        "b",
        lambda b, h, i, j, d: IDS_OF_EACH[b, i] == IDS_OF_EACH[b, j],
    ),
    "head": (MaskMod(near, reach=REACH), "h", lambda b, h, i, j, d: abs(i - j) <= REACH[h]),
    "both": (
        MaskMod(chosen, table=TABLE),
        "bh",
        lambda b, h, i, j, d: TABLE[b, h] and (i + j) // 16 % 2 == 0,
    ),
    "two functions and a band": (
        MaskMod(document_of_each, ids=IDS_OF_EACH) & Causal() & MaskMod(near, reach=REACH),
        "bh",
        lambda b, h, i, j, d: IDS_OF_EACH[b, i] == IDS_OF_EACH[b, j] and 0 <= i - j <= REACH[h],
    ),
    "nothing": (MaskMod(lambda b, h, q, kv: q < 0), "", lambda b, h, i, j, d: False),
    "queries alone": (
        MaskMod(lambda b, h, q, kv: q % 7 == 3),
        "",
        lambda b, h, i, j, d: i % 7 == 3,
    ),
}
SIZES = [(37, 53, (8, 16)), (53, 37, (5, 128)), (16, 32, (16, 4)), (1, 9, (128, 128))]


def expected(sees, extents, block_shape):
    """Where some pair of a block is seen, and where all are."""
    B, H, S_q, S_kv = extents
    queries, keys = block_shape
    some = torch.zeros(B, H, -(-S_q // queries), -(-S_kv // keys), dtype=torch.bool)
    every = torch.ones_like(some)
    for b, h, i, j in itertools.product(*map(range, extents)):
        seen = bool(sees(b, h, i, j, S_kv - S_q))
        some[b, h, i // queries, j // keys] |= seen
        every[b, h, i // queries, j // keys] &= seen
    return some, every


def table_of(mask, *sizes, **options):
    return with_blocks(mask, *sizes, **options).blocks.table.tensor


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize(("mask", "looks", "sees"), CASES.values(), ids=CASES.keys())
def test_a_block_is_there_iff_a_pair_of_it_is_shown(mask, looks, sees, sizes):
    S_q, S_kv, block_shape = sizes
    extents = 2 if "b" in looks else 1, 4 if "h" in looks else 1, S_q, S_kv
    found = table_of(mask, S_q, S_kv, B=2, H=4, block_shape=block_shape, device="cpu")
    some, every = expected(sees, extents, block_shape)
    assert_close(found != 0, some)
    assert found.dtype is (torch.uint8 if mask.functions else torch.bool)
    if mask.functions and not mask.bounds:
        assert_close(found == BlockSparse.FULL, every)


def test_a_block_is_full_where_functions_show_all_whatever_a_band_hides():
    table = table_of(MaskMod(document, ids=IDS) & Causal(), 53, 53, block_shape=(8, 8))
    of_documents = table_of(MaskMod(document, ids=IDS), 53, 53, block_shape=(8, 8))
    assert {0, 1, BlockSparse.FULL} == set(of_documents.unique().tolist())
    places = torch.arange(7)
    assert_close(table, of_documents * (places[:, None] >= places))
    assert table[0, 0].diagonal().eq(BlockSparse.FULL).any()


@pytest.mark.parametrize("pairs", [1, 30, 200, 3000])
@pytest.mark.parametrize("name", ["two functions and a band", "causal, bottom right"])
def test_a_table_does_not_depend_on_how_many_pairs_are_looked_at_at_once(name, pairs, monkeypatch):
    from kernel_api.providers.reference import sdpa_blocks

    mask, *_ = CASES[name]
    options = {"B": 2, "H": 4, "block_shape": (8, 16), "device": "cpu"}
    whole = table_of(mask, 19, 37, **options)
    monkeypatch.setattr(sdpa_blocks, "_PAIRS", pairs)
    assert_close(table_of(mask, 19, 37, **options), whole)


class Watch(TorchDispatchMode):
    """Sees the largest tensor that is made, and whether anything is read by the host."""

    def __init__(self):
        super().__init__()
        self.bytes, self.is_read = 0, False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.is_read |= function is torch.ops.aten._local_scalar_dense.default
        made = function(*args, **(kwargs or {}))
        for one in [made] if isinstance(made, torch.Tensor) else []:
            self.bytes = max(self.bytes, one.untyped_storage().nbytes())
        return made


def test_many_pairs_are_looked_at_some_at_a_time_and_nothing_is_read_meanwhile():
    S, block = 6000, 128
    ends = torch.arange(0, S, 500)
    ids = torch.bucketize(torch.arange(S), ends, right=True)
    with Watch() as watch:
        found = table_of(MaskMod(document, ids=ids) & Causal(), S, S)
    assert watch.bytes <= 32 << 20 and not watch.is_read
    first = torch.arange(0, S, block)
    last = (first + block).clamp(max=S) - 1
    shown = (ids[last][None] >= ids[first][:, None]) & (ids[first][None] <= ids[last][:, None])
    full = (ids[first][None] == ids[last][:, None]) & (ids[last][None] == ids[first][:, None])
    assert_close(found[0, 0], (shown & (first[None] <= last[:, None])) * (1 + full.byte()))


@pytest.mark.parametrize("element", ["float32", "float64"])
@pytest.mark.parametrize("name", [*CASES, "tenths"])
def test_attention_with_the_table_is_attention_without(name, element):
    mask = CASES[name][0] if name in CASES else MaskMod(tenths)
    draw = Draw(2, 4, 2, 37, 53, element=element)
    q, k, v = draw.queries(), draw.keys(), draw.values()
    blocks = with_blocks(mask, 37, 53, B=2, H=4, block_shape=(4, 8), device="cpu")
    without, found = (ka.ops.sdpa(q, k, v, mask=one) for one in (mask, blocks))
    assert_close(found, without)


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_a_block_that_any_arithmetic_shows_is_there(kind):
    """3 · 0.1 is above 0.3 in float64, and is not in float32."""
    steps = torch.tensor([0.1, 3.0], dtype=torch.float64)

    def above(b, h, q, kv, steps):
        return (steps[0] * steps[1] > 0.3) & (q == kv)

    def below(b, h, q, kv, steps):
        return (steps[0] * steps[1] <= 0.3) & (q == kv)

    q = torch.randn(1, 1, 4, 16, dtype=kind)
    for fn in (above, below):
        mask = MaskMod(fn, steps=steps)
        blocks = with_blocks(mask, 4, 4, block_shape=(2, 2))
        assert_close(blocks.blocks.table.tensor[0, 0], torch.eye(2, dtype=torch.uint8))
        assert_close(ka.ops.sdpa(q, q, q, mask=blocks), ka.ops.sdpa(q, q, q, mask=mask))

    mask = MaskMod(lambda b, h, q, kv, steps: steps[0] * steps[1] > 0.3, steps=steps)
    assert_close(table_of(mask, 4, 4, block_shape=(2, 2)), torch.ones(1, 1, 2, 2).byte())


def test_the_mask_itself_stays():
    mask = MaskMod(document, ids=IDS) & Causal() & Padding()
    found = with_blocks(mask, 53, 53, block_shape=(16, 32))
    assert found.parts[:-1] == mask.parts
    assert found.blocks.block_shape == (16, 32)
    assert isinstance(with_blocks(Causal(), 8, 8, device="cpu").parts[-1], BlockSparse)


def test_sequences_may_end_before():
    """A window from the end hides no block where each sequence ends somewhere else."""
    mask = MaskMod(document, ids=IDS) & SlidingWindow(2, 0, "bottom_right") & Padding()
    draw = Draw(3, 4, 2, 37, 53)
    q, k, v = draw.queries(), draw.keys(), draw.values()
    lengths = {
        "seq_lens_q": torch.tensor([37, 9, 20], dtype=torch.int32),
        "seq_lens_kv": torch.tensor([30, 53, 0], dtype=torch.int32),
    }
    blocks = with_blocks(mask, 37, 53, block_shape=(4, 8))
    assert_close(
        blocks.blocks.table.tensor, table_of(MaskMod(document, ids=IDS), 37, 53, block_shape=(4, 8))
    )
    without, found = (ka.ops.sdpa(q, k, v, mask=one, **lengths) for one in (mask, blocks))
    assert_close(found, without, rtol=0, atol=0)


def test_tables_are_made_between_graphs_of_torch():
    q = torch.randn(1, 2, 53, 16)

    def function(q, ids):
        mask = with_blocks(MaskMod(document, ids=ids), q.shape[2], q.shape[2], block_shape=(8, 8))
        return ka.ops.sdpa(q * 2, q, q, mask=mask)

    torch._dynamo.reset()
    assert_close(torch.compile(function, backend="aot_eager")(q, IDS), function(q, IDS))


def test_of_operands_without_data_a_table_has_none():
    mask = MaskMod(document_of_each, ids=torch.empty(3, 53, dtype=torch.int32, device="meta"))
    found = table_of(mask & Causal(), 37, 53, B=3, H=4, block_shape=(8, 16))
    assert found.is_meta and found.shape == (3, 1, 5, 4) and found.dtype is torch.uint8
    assert table_of(Causal(), 37, 53, device="meta").is_meta
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(IDS)
        found = table_of(MaskMod(document, ids=fake), 53, 53)
    assert isinstance(found, torch._subclasses.FakeTensor) and found.device == fake.device


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), None])
def test_a_table_lies_beside_the_operands(device):
    assert table_of(MaskMod(document, ids=IDS), 53, 53, device=device).device == IDS.device
    assert table_of(Causal(), 53, 53, device=device or "cpu").device.type == "cpu"


@pytest.mark.parametrize("available", [False, True])
def test_without_operands_a_table_lies_on_the_current_device(available, monkeypatch):
    from kernel_api.providers.reference import sdpa_blocks

    seen = []

    def shown_blocks(*given):
        seen.append(given[-1])
        return torch.ones(1, 1, 1, 1, dtype=torch.bool)

    monkeypatch.setattr(sdpa_blocks, "shown_blocks", shown_blocks)
    monkeypatch.setattr(ka.devices, "cuda_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    with_blocks(Causal(), 8, 8)
    assert seen == [torch.device("cuda:3" if available else "cpu")]


EACH = MaskMod(document_of_each, ids=IDS_OF_EACH)
ON_META = torch.empty(4, dtype=torch.int32, device="meta")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: with_blocks(None, 8, 8), "mask is None; expected a Mask of kernel_api.masks"),
        (lambda: with_blocks("causal", 8, 8), "mask is a str; expected a Mask of kernel_api.masks"),
        (lambda: with_blocks(Causal, 8, 8), r"mask is the class Causal; expected one, Causal\(\)"),
        (
            lambda: with_blocks(with_blocks(EACH, 8, 8, B=2), 8, 8, B=2),
            "the mask has a BlockSparse, and with_blocks makes another; pass the mask without it, "
            "and combine the two tables to one of one block_shape, with `&` where they are bool, ",
        ),
        (lambda: with_blocks(EACH, 0, 8, B=2), "S_q is 0; expected a number of queries, from 1"),
        (lambda: with_blocks(EACH, 8, -1, B=2), "S_kv is -1; expected a number of keys, from 1"),
        (lambda: with_blocks(EACH, 8.0, 8, B=2), "S_q is 8.0; expected a number of queries"),
        (lambda: with_blocks(EACH, 8, True, B=2), "S_kv is True; expected a number of keys"),
        (lambda: with_blocks(EACH, 8, 8, B=0), "B is 0; expected a number of sequences, from 1"),
        (lambda: with_blocks(Causal(), 8, 8, H="8"), "H is '8'; expected a number of heads of que"),
        (
            lambda: with_blocks(EACH & Causal(), 8, 8, H=4),
            "B is None, and a function of the mask looks at b; expected the number of sequences",
        ),
        (
            lambda: with_blocks(MaskMod(near, reach=REACH), 8, 8, B=2),
            "H is None, and a function of the mask looks at h; expected the number of heads of que",
        ),
        (lambda: with_blocks(Causal(), 8, 8, block_shape=128), r"block_shape is 128; expected \(q"),
        (lambda: with_blocks(Causal(), 8, 8, block_shape=(0, 8)), "expected at least 1 of each"),
        (lambda: with_blocks(Causal(), 8, 8, device="gpus"), "device is 'gpus'; expected a torch"),
        (
            lambda: with_blocks(EACH, 8, 8, B=2, device="meta"),
            "device is 'meta' and ids of the mask is on 'cpu'; expected the table beside it: leave",
        ),
        (
            lambda: with_blocks(EACH & MaskMod(near, reach=ON_META), 8, 8, B=2, H=4),
            "reach is on meta but ids is on cpu; expected one device for all",
        ),
        (
            lambda: with_blocks(MaskMod(document, ids=IDS[:0]), 8, 8),
            r"ids has shape \(0,\); the mask reads it: expected an element at least",
        ),
    ],
)
def test_what_no_table_is_made_of_is_refused(make, words):
    with pytest.raises(ArgumentError, match=words):
        make()


def test_a_gpu_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(ka.devices, "cuda_available", lambda: False)
    with pytest.raises(DeviceError, match="device is 'cuda:1' but torch sees no GPU; pass 'cpu'"):
        with_blocks(Causal(), 8, 8, device="cuda:1")
    assert "with_blocks" in masks.__all__
