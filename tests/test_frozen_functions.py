"""Traces of functions are kept where they would come out the same, and only there."""

import functools
import math
import random
from types import SimpleNamespace

import numpy
import pytest
import torch
from support.data import gemm_tensors

import kernel_api as ka
from kernel_api.epilogue import frozen as module
from kernel_api.epilogue.frozen import frozen
from kernel_api.errors import EpilogueError

FACTOR = 2.0
SETTINGS = SimpleNamespace(factor=2.0)
NUMBERS = [2.0]


def doubled(value):
    return value * FACTOR


def times(factor):
    return lambda value: value * factor


def by_helper(value):
    return doubled(value) + 1


def by_own_function(value):
    return ka.epilogue.tanh(value) * math.pi


def by_inner(value):
    return sum((lambda i: value * FACTOR * i)(i) for i in range(3))


def by_default(value, factor=2.0, *, power=2):
    return value * factor**power


def by_object(value):
    return value * SETTINGS.factor


def by_list(value):
    return value * NUMBERS[0]


def by_other_module(value):
    return value * numpy.float64(2)


def by_chance(value):
    return value * random.random()


def by_import(value):
    import support.data

    return value * len(support.data.__name__)


def by_names(value):
    return value * globals()["FACTOR"]


def by_setting(value):
    global FACTOR
    FACTOR = 2.0
    return value


def by_itself(value):
    return by_itself(value)


@functools.lru_cache
def remembered(value):
    return value


@pytest.mark.parametrize(
    "fn", [doubled, times(2), by_helper, by_own_function, by_inner, by_default, ka.epilogue.gelu]
)
def test_what_depends_on_numbers_and_functions_is_kept(fn):
    assert frozen(fn) is not None
    assert frozen(fn) == frozen(fn)


@pytest.mark.parametrize(
    "fn",
    [
        *(by_object, by_list, by_other_module, by_chance, by_import, by_names, by_setting),
        *(by_itself, remembered, times(NUMBERS), times(torch.ones(1)), times(numpy.float64(2))),
        *(functools.partial(times(2)), SimpleNamespace, print, "doubled"),
    ],
)
def test_of_anything_else_nothing_is_kept(fn):
    assert frozen(fn) is None


def test_what_a_function_finds_outside_tells_it_apart(monkeypatch):
    values = (2, 2.0, True, 3, 0.0, -0.0, math.nan, "2", None)
    keys = {frozen(times(value)) for value in values}
    assert len(keys) == len(values)
    assert frozen(times(math.nan)) in keys
    changed = (doubled, by_helper, by_inner)
    before = [frozen(fn) for fn in changed]
    monkeypatch.setitem(globals(), "FACTOR", 2)
    assert all(frozen(fn) != one for fn, one in zip(changed, before, strict=True))
    before = frozen(by_helper)
    monkeypatch.setitem(globals(), "doubled", times(4))
    assert frozen(by_helper) != before
    before = frozen(by_default)
    monkeypatch.setattr(by_default, "__kwdefaults__", {"power": 3})
    assert frozen(by_default) != before


def test_a_cell_that_is_empty_yet_is_nothing_that_is_known():
    def early(value):
        return value * later

    assert frozen(early) is None
    later = 2.0
    assert frozen(early) is not None


def test_an_epilogue_is_traced_again_where_a_number_has_changed(monkeypatch):
    monkeypatch.setattr(module, "_kept", {})
    calls = []

    def graph_of(factor):
        def fn(accumulator, bias):
            calls_of(factor)
            return accumulator * factor + bias

        epilogue = ka.EpilogueArguments(fn, bias=torch.ones(6))
        return ka.GemmArguments(*gemm_tensors(5, 6, 4), epilogue=epilogue).epilogue.graph

    def calls_of(factor):
        calls.append(factor)

    # The list makes every call a new trace.
    assert graph_of(2.0) == graph_of(2.0) != graph_of(3.0)
    assert calls == [2.0, 2.0, 3.0]

    def scaled(factor):
        epilogue = ka.EpilogueArguments(lambda acc: acc * factor)
        return ka.GemmArguments(*gemm_tensors(5, 6, 4), epilogue=epilogue).epilogue.graph

    assert scaled(2.0) is scaled(2.0)
    assert scaled(2.0) != scaled(3.0)


def test_what_cannot_be_traced_is_refused_every_time():
    def fn(accumulator):
        return accumulator if accumulator > 0 else 0.0

    for _ in range(2):
        with pytest.raises(EpilogueError, match=r"test_frozen_functions\.py"):
            ka.GemmArguments(*gemm_tensors(5, 6, 4), epilogue=ka.EpilogueArguments(fn))


def test_few_functions_and_few_traces_of_each_are_kept(monkeypatch):
    monkeypatch.setattr(module, "_kept", {})
    for factor in range(2 * module._FUNCTIONS_KEPT):
        module.traces_of(times(factor))[0] = factor
    assert len(module._kept) == module._FUNCTIONS_KEPT
    assert module.traces_of(times(factor)) == {0: factor}
    assert module.traces_of(times(0)) == {}
    found = module.traces_of(doubled)
    found.update(dict.fromkeys(range(module._TRACES_KEPT)))
    assert module.traces_of(doubled) == {}
