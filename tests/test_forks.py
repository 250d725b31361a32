"""A process that is forked while its threads hold locks."""

import os
import re
import signal
import threading
from pathlib import Path

import pytest

import kernel_api as ka
from kernel_api import _compile_cache, _locks
from kernel_api._cached_property import cached_property
from kernel_api.graph import graph_cache, pygraph
from kernel_api.providers.cutedsl import compiler

SOURCES = [p for one in (ka, ka.providers) for p in Path(one.__path__[0]).rglob("*.py")]


@pytest.fixture
def meanwhile():
    """Another thread does something until the test ends, here from when it says so."""
    over, threads = threading.Event(), []

    def start(work):
        inside = threading.Event()

        def wait():
            inside.set()
            over.wait(60)

        threads.append(threading.Thread(target=work, args=(wait,)))
        threads[-1].start()
        assert inside.wait(60)

    yield start
    over.set()
    for one in threads:
        one.join()


def in_child(work):
    """The exit code of a child that does something; it may take 20 seconds."""
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def test_every_lock_that_a_thread_held_is_free_in_the_child(meanwhile):
    graph = pygraph()
    every = list(_locks._made)
    assert {_compile_cache._lock, compiler._lock, graph._lock} <= set(every)

    def hold(wait):
        for one in every:
            assert one.acquire(timeout=10)
        wait()
        for one in every:
            one.release()

    def acquire():
        assert all(one.acquire(timeout=10) for one in every)

    meanwhile(hold)
    assert in_child(acquire) == 0


def test_every_lock_is_one_that_is_free_in_a_child():
    makes = re.compile(r"\b(Lock|RLock|Semaphore|BoundedSemaphore|Condition)\(\)|from threading")
    found = [path.name for path in SOURCES if makes.search(path.read_text())]
    assert found == ["_locks.py"]


def test_no_property_is_cached_behind_a_lock():
    """As functools does before Python 3.12."""
    takes = re.compile(r"functools(\.| import .*\b)cached_property")
    assert not [path.name for path in SOURCES if takes.search(path.read_text())]


def test_a_lock_that_the_forking_thread_holds_is_its_own_in_the_child():
    lock = _locks.rlock()
    with lock:
        assert in_child(lock.release) == 0


def test_a_compilation_of_another_thread_is_not_waited_for_in_the_child(meanwhile):
    key = object(), (), None

    def compile_(wait):
        with _compile_cache._flights.setdefault(key, _locks.lock()):
            wait()

    def compile_too():
        assert _compile_cache._flights[key].acquire(timeout=10)

    meanwhile(compile_)
    assert in_child(compile_too) == 0
    del _compile_cache._flights[key]


def test_a_graph_that_another_thread_makes_is_made_in_the_child(meanwhile):
    waits = []

    @graph_cache(key_fn=lambda: 0)
    def make():
        for wait in waits:
            wait()

    def make_there(wait):
        waits.append(wait)
        make()

    def make_here():
        waits.clear()
        make()

    meanwhile(make_there)
    assert in_child(make_here) == 0


def test_what_another_thread_computes_once_is_not_waited_for(meanwhile):
    class Computed:
        def __init__(self, wait):
            self.wait = wait

        @cached_property
        def value(self):
            """What it is."""
            self.wait()
            return [self]

    meanwhile(lambda wait: Computed(wait).value)
    one = Computed(lambda: None)
    assert in_child(lambda: one.value) == 0
    assert one.value is one.value
    assert Computed.value.__doc__ == "What it is."


def test_a_cached_property_may_ask_the_one_of_a_base_class():
    class Base:
        @cached_property
        def sizes(self):
            """Those of the base."""
            asked.append("base")
            return (1,)

    class Derived(Base):
        @cached_property
        def sizes(self):
            asked.append("derived")
            return (*super().sizes, 2)

    asked = []
    one = Derived()
    assert one.sizes == (1, 2) == one.sizes
    assert asked == ["derived", "base"]
    assert Base.sizes.__doc__ == "Those of the base."
