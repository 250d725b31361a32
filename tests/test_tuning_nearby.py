"""What is taken for sizes that were not measured, by what was measured on others."""

from types import SimpleNamespace

import pytest
import torch

import kernel_api as ka
from kernel_api import fusions, masks
from kernel_api._description import described, rebuilt
from kernel_api.errors import PluginWarning
from kernel_api.tuning import _lookup, _nearby
from kernel_api.tuning._problem import Problem

BF16, F32, F8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn


def meta(*shape, dtype=BF16):
    return torch.empty(shape, dtype=dtype, device="meta")


def product(M, N=512, K=256):
    return ka.GemmArguments(meta(M, K), meta(N, K).T, meta(M, N))


class Modelled:
    """A kernel of tiles of so many rows, of which a GPU computes eight at a time."""

    def __init__(self, rows, error=1.0, least=0):
        self.rows, self.error, self.least = rows, error, least
        self.metadata = SimpleNamespace(kernel_name=f"kernel {id(self)}")

    def supports(self, args):
        return self.least <= args.M

    def predict(self, args):
        assert args.device.type == "meta"
        return self.error * self.rows * -(-args.M // (8 * self.rows))


class Unmodelled(Modelled):
    def __init__(self):
        super().__init__(1)

    def predict(self, args):
        return None


class Faulty(Modelled):
    @classmethod
    def provider_name(cls):
        return "mine"

    def predict(self, args):
        raise ValueError("no such size")


def taken(M, measured, choice=None, failed=(), untaken=()):
    """What is taken for M rows, if `choice` is the model's, by kernels that were measured on 128
    rows in so many microseconds: all of them but `untaken` take M rows, and `failed` did not pass.
    """
    problem = Problem.of(product(128))
    rows = {
        kernel: SimpleNamespace(
            problem=problem,
            kernel=SimpleNamespace(name=kernel.metadata.kernel_name),
            median_us=microseconds,
            passed=kernel not in failed,
        )
        for kernel, microseconds in measured.items()
    }
    usable = [k for k in rows if k not in failed and k not in untaken][: _nearby.FASTEST]
    fastest = {kernel: rows[kernel] for kernel in usable}
    return _nearby.expected_fastest(product(M), [*rows.values()], fastest, choice)


def test_tiles_that_fill_a_gpu_once_are_not_taken_for_a_few_rows_more():
    small, large = Modelled(16), Modelled(32)
    measured = {small: 16.0, large: 30.0}
    assert taken(128, measured, small) is small
    assert taken(129, measured, small) is large


def test_a_model_that_is_wrong_about_a_kernel_is_corrected():
    praised, right = Modelled(16, error=0.5), Modelled(16)
    assert taken(200, {right: 16.0, praised: 24.0}, praised) is right


def test_the_choice_of_the_model_is_taken_where_what_was_fastest_does_not_suit():
    small, choice = Modelled(16), Modelled(40)
    assert taken(256, {small: 16.0}, choice) is small
    assert taken(260, {small: 16.0}, choice) is choice


def three(*microseconds):
    """Kernels with rows, all of them the same but for their times."""
    return {Modelled(16): one for one in microseconds}


@pytest.mark.parametrize(("third", "is_taken"), [(30.0, True), (40.0, False)])
def test_a_choice_that_is_none_of_the_three_fastest_took_as_long_as_the_third(third, is_taken):
    """It has one round for 200 rows as for 128, the others two: the fastest needs 32 us."""
    measured, choice = three(16.0, 16.1, third), Modelled(32, error=0.5)
    assert taken(200, measured, choice) is (choice if is_taken else next(iter(measured)))


def test_two_rows_say_nothing_of_what_else_was_measured():
    choice = Modelled(16, error=0.9)
    assert taken(120, three(16.0, 16.1), choice) is choice
    assert taken(120, three(16.0, 16.1, 16.2), choice) is not choice


def test_rows_of_kernels_that_do_not_take_the_sizes_say_nothing_either():
    staged, slow = Modelled(16), three(60.0, 61.0, 62.0)
    choice = Modelled(16, error=0.9)
    assert taken(120, {staged: 16.0, **slow}, choice, untaken={staged}) is choice


def test_a_choice_that_cannot_run_on_the_other_sizes_was_not_slow_there():
    choice = Modelled(16, error=0.9)
    choice.supports = lambda args: args.M < 128
    assert taken(120, three(16.0, 16.1, 30.0), choice) is choice


@pytest.mark.parametrize("microseconds", [1000.0, 17.0])
def test_a_choice_with_a_row_takes_what_it_says(microseconds):
    choice = Modelled(16, error=0.5)
    measured = {**three(16.0, 16.5, 16.6), choice: microseconds}
    assert taken(120, measured, choice) is next(iter(measured))


def test_a_choice_that_failed_is_not_taken():
    choice = Modelled(16, error=0.1)
    measured = {**three(16.0), choice: 0.0}
    assert taken(120, measured, choice, failed={choice}) is next(iter(measured))


def test_without_models_the_fastest_is_taken():
    first, second = Unmodelled(), Unmodelled()
    assert taken(200, {first: 1.0, second: 2.0}, Modelled(16)) is first


def test_a_faulty_model_is_none():
    first, second = Faulty(16), Faulty(16)
    with pytest.warns(PluginWarning, match="without a prediction: ValueError: no such size"):
        assert taken(200, {first: 1.0, second: 2.0}, Faulty(16)) is first


def test_a_kernel_without_a_model_changes_as_the_fastest_one_that_has_one():
    other, small, large, choice = Unmodelled(), Modelled(16), Modelled(64), Modelled(40)
    assert taken(120, {other: 15.0, small: 16.0, large: 90.0}, choice) is other
    assert taken(120, {small: 15.0, other: 16.0, large: 90.0}, choice) is small
    assert taken(260, {other: 15.0, small: 16.0}, choice) is choice


def attention(S, **options):
    Q, K = meta(2, 8, S, 64), meta(2, 2, S, 64)
    return ka.SdpaArguments(Q, K, K.clone(), torch.empty_like(Q), **options)


def scaled(M):
    A = ka.ScaledOperand(meta(M, 256, dtype=F8), meta(M, dtype=F32), ka.ScaleMode.PER_ROW)
    B = ka.ScaledOperand(meta(512, 256, dtype=F8).T, meta(512, dtype=F32), ka.ScaleMode.PER_ROW)
    return ka.GemmArguments(A, B, meta(M, 512))


def fused(M):
    A, B = meta(M, 256), meta(512, 256).T
    return fusions.gemm_bias_activation(A, B, bias=meta(512), alpha=0.3, out=meta(M, 512))


def of_groups(T):
    offsets = torch.empty(4, dtype=torch.int32, device="meta")
    return ka.GroupedGemmArguments(meta(T, 256), meta(4, 512, 256).mT, meta(T, 512), offsets)


def of_rows(M):
    return ka.RmsNormArguments(meta(M, 512), meta(M, 512), weight=meta(512), eps=1e-3)


def capped(score, b, h, q, kv):
    return score * 0.5


@pytest.mark.parametrize(
    "make",
    [
        product,
        scaled,
        fused,
        of_groups,
        of_rows,
        attention,
        lambda S: attention(S, mask=masks.SlidingWindow(48, 0), scale=0.3),
        lambda S: attention(S, score_mod=capped, lse=meta(2, 8, S, dtype=F32)),
        lambda S: attention(S, mask=masks.Causal() & masks.SlidingWindow(16, 0)),
    ],
)
def test_a_problem_has_its_sizes_again_and_the_rest_of_what_is_like_it(make):
    args, nearby = make(96), Problem.of(make(128))
    assert Problem.of(args).distance(nearby) is not None
    there = rebuilt(_nearby._filled(described(args), nearby.to_dict()["arguments"]))
    assert Problem.of(there) == nearby


# Looked up ---------------------------------------------------------------------------------


class Rounded(Modelled):
    """Numbers of rows are rounded up to sixteens."""

    def estimated_by(self, args):
        return -(-args.M // 16)

    def predict(self, args):
        return super().predict(product(16 * self.estimated_by(args)))


class Untold(Modelled):
    def estimated_by(self, args):
        return None


@pytest.fixture
def expected(monkeypatch):
    """Counts what is expected anew."""
    found, ask = [], _lookup.expected_fastest

    def counted(*given):
        found.append(given)
        return ask(*given)

    monkeypatch.setattr(_lookup, "expected_fastest", counted)
    return found


def measured_of(*kernels):
    problem = Problem.of(product(128))
    rows = [
        SimpleNamespace(
            problem=problem,
            kernel=SimpleNamespace(name=kernel.metadata.kernel_name),
            median_us=16.0 + place,
            passed=True,
        )
        for place, kernel in enumerate(kernels)
    ]
    return _lookup._Measured(rows), dict(zip(kernels, rows, strict=True))


def expected_of(measured, args, rows, choice=None, device="cuda:0"):
    before = measured.expected_before(args, device)
    return before or measured.expected(args, device, rows, choice)


def test_what_is_estimated_the_same_is_expected_once(expected):
    kernels = Rounded(16), Rounded(64)
    measured, rows = measured_of(*kernels)
    for M in range(113, 200):
        found = expected_of(measured, product(M), rows)
        assert found is taken(16 * -(-M // 16), dict(zip(kernels, (16.0, 17.0), strict=True)))
    assert len(expected) == len({-(-M // 16) for M in range(113, 200)})


def test_other_arguments_and_devices_are_expected_for_themselves(expected):
    measured, rows = measured_of(Rounded(16), Rounded(64))
    activated = fusions.gemm_bias_activation(
        meta(120, 256), meta(512, 256).T, out=meta(120, 512), activation="relu"
    )
    asked = [(product(120), 0), (product(120), 1), (product(120, N=1024), 0), (activated, 0)]
    for count, (args, device) in enumerate(asked, 1):
        for _ in range(2):
            expected_of(measured, args, rows, Rounded(8), device=f"cuda:{device}")
        assert len(expected) == count


def test_what_the_choice_of_the_model_is_estimated_by_counts_as_well(expected):
    coarse, choice = Rounded(16), Rounded(64)
    coarse.estimated_by = lambda args: 128
    measured, rows = measured_of(coarse)
    for M in (113, 128, 129, 140):
        expected_of(measured, product(M), rows, choice)
    assert [given[0].M for given in expected] == [113, 129]


def test_what_was_expected_is_not_taken_where_it_cannot_be(expected):
    small, large = Rounded(16), Rounded(64)
    small.supports = lambda args: args.M != 120
    measured, rows = measured_of(small, large)
    assert expected_of(measured, product(113), rows) is small
    assert expected_of(measured, product(120), {large: rows[large]}) is large
    assert len(expected) == 2


def test_what_depends_on_more_than_is_told_is_expected_every_time(expected):
    measured, rows = measured_of(Rounded(16), Untold(64))
    for _ in range(3):
        expected_of(measured, product(120), rows)
    assert len(expected) == 3


def test_few_are_kept(expected, monkeypatch):
    monkeypatch.setattr(_lookup, "_PROBLEMS_KEPT", 2)
    measured, rows = measured_of(Rounded(16))
    for M in range(16, 160, 16):
        expected_of(measured, product(M), rows)
        assert len(measured._expected) <= 2


def test_a_store_is_opened_again_where_settings_are_others(tmp_path, monkeypatch):
    cpu = torch.device("cpu")
    for folder in ("one", "other"):
        monkeypatch.setenv("KERNEL_API_CACHE_DIR", str(tmp_path / folder))
        first = _lookup._store(cpu)
        assert first.folder == tmp_path / folder / "tuning" and _lookup._store(cpu) is first
    _lookup.changed()
    assert _lookup._store(cpu) is not first
    monkeypatch.setenv("KERNEL_API_DISABLE_CACHE", "1")
    assert _lookup._store(cpu) is None
