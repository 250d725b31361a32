"""A process that is forked while a thread of it compiles."""

import os
import threading

import pytest

from kernel_api import _compile_cache
from kernel_api.providers.cutedsl import compiler


@pytest.mark.parametrize("module", [_compile_cache, compiler], ids=lambda one: one.__name__)
def test_a_lock_that_a_thread_held_is_free_in_the_child(module):
    held, over = threading.Event(), threading.Event()

    def hold():
        with module._lock:
            held.set()
            over.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(60)
    child = os.fork()
    if child == 0:
        os._exit(0 if module._lock.acquire(timeout=10) else 1)
    over.set()
    thread.join()
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_a_compilation_of_another_thread_is_not_waited_for_in_the_child():
    key = object(), (), None
    flight = _compile_cache._flights[key] = threading.Lock()
    flight.acquire()
    child = os.fork()
    if child == 0:
        os._exit(len(_compile_cache._flights))
    _, status = os.waitpid(child, 0)
    del _compile_cache._flights[key]
    assert os.waitstatus_to_exitcode(status) == 0
