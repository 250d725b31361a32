"""Traces of functions are kept where they would come out the same, and only there."""

import functools
import math
import random
import time
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
        assert module.kept(times(factor), 0, lambda factor=factor: factor) == factor
    assert len(module._kept) == module._FUNCTIONS_KEPT
    assert module.kept(times(factor), 0, lambda: -1) == factor
    assert module.kept(times(0), 0, lambda: -1) == -1
    for look in range(2 * module._TRACES_KEPT):
        module.kept(doubled, look, lambda look=look: look)
    assert len(module._kept[frozen(doubled)]) <= module._TRACES_KEPT
    assert module.kept(doubled, look, lambda: -1) == look


def test_what_changes_while_it_is_traced_is_not_kept(monkeypatch):
    monkeypatch.setattr(module, "_kept", {})

    def changing():
        monkeypatch.setitem(globals(), "FACTOR", 3.0)
        return "of 3"

    assert module.kept(doubled, 0, changing) == "of 3"
    monkeypatch.setitem(globals(), "FACTOR", 2.0)
    assert module.kept(doubled, 0, lambda: "of 2") == "of 2"


def wrapping(factor):
    @functools.wraps(ka.epilogue.gelu)
    def fn(value):
        return value * factor

    return fn


def by_attribute(value):
    return doubled(value) * doubled.factor


def by_text(value):
    return doubled(value) * len(doubled.__doc__ or "")


def toggling():
    factor = 2.0

    def fn(value):
        nonlocal factor
        factor = 5.0 - factor
        return value * factor

    return fn


@pytest.mark.parametrize("fn", [wrapping(2.0), by_text, toggling()])
def test_nor_what_is_said_of_functions_nor_what_they_change(fn):
    assert frozen(fn) is None


def test_attributes_of_functions_are_not_known(monkeypatch):
    monkeypatch.setattr(doubled, "factor", 2.0, raising=False)
    assert frozen(by_attribute) is None
    assert frozen(doubled) is None


def with_default(default):
    def fn(value, one=default):
        return value

    return fn


def test_tuples_are_told_apart_by_how_they_are_nested():
    values = (2.0, (2.0,), ((2.0,),), (2.0, 3.0), (2.0, (3.0,)), ("",), "", ((1,), ()), ((), (1,)))
    assert len({frozen(with_default(value)) for value in values}) == len(values)


def test_the_name_under_which_something_is_found_counts():
    code = "def fn(value): return abs(value) + min(value, 3)"
    keys = set()
    for name in ("abs", "min"):
        outside = {name: doubled, "__name__": "elsewhere"}
        exec(compile(code, "elsewhere", "exec"), outside)
        keys.add(frozen(outside["fn"]))
    assert len(keys) == 2 and None not in keys


def test_what_is_put_in_place_of_something_in_a_module_counts(monkeypatch):
    before = frozen(by_own_function)
    monkeypatch.setattr(ka.epilogue, "tanh", doubled)
    changed = frozen(by_own_function)
    monkeypatch.setattr(math, "pi", 3.0)
    assert len({before, changed, frozen(by_own_function)}) == 3
    monkeypatch.undo()
    assert frozen(by_own_function) == before
    monkeypatch.setattr(math, "pi", [3.0])
    assert frozen(by_own_function) is None


def test_other_builtins_are_not_known(monkeypatch):
    import builtins

    outside = {"__builtins__": {**vars(builtins), "sum": max}, "__name__": "elsewhere"}
    exec("def fn(value): return sum(value, 3)", outside)
    assert frozen(outside["fn"]) is None
    monkeypatch.setattr(builtins, "sum", [])
    assert frozen(by_inner) is None


def test_functions_that_call_each_other_are_looked_at_once():
    layers = [times(2.0)]
    for _ in range(module._DEEPEST - 2):
        layers.append(of_both(layers[-1]))
    started = time.perf_counter()
    assert frozen(layers[-1]) is not None
    assert time.perf_counter() - started < 0.05


def of_both(fn, *, again=6):
    several = (fn,) * again
    return lambda value: sum(one(value) for one in several)
