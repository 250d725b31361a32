"""The process that forks workers, used by itself."""

import os
import resource
import socket
import sys

import pytest

from kernel_api import _fork_server

TARGET = "support.children:tell_environment"


@pytest.fixture
def server():
    one = _fork_server.ForkServer(("json",))
    yield one
    one.close()


def asked(child, name):
    child.send(name)
    return child.receive(timeout_s=30.0)


def ended(child):
    child.close()
    return child.exit_code(timeout_s=30.0)


def test_an_environment_may_be_longer_than_a_message(server):
    longest = {f"LONG{i}": "x" * 100_000 for i in range(12)}
    child = server.start(TARGET, longest)
    assert asked(child, "LONG11") == 100_000 and asked(child, "HOME") == 0
    assert ended(child) == 0


@pytest.mark.parametrize("is_closed", [True, False])
def test_a_program_may_have_no_stderr(is_closed, tmp_path, monkeypatch, request):
    with open(tmp_path / "stderr", "w") as stderr:
        monkeypatch.setattr(sys, "__stderr__", stderr if is_closed else None)
    child = request.getfixturevalue("server").start(TARGET, {"A": "123"})
    assert asked(child, "A") == 3
    assert ended(child) == 0


@pytest.fixture
def many_files():
    """More open files than select() can tell apart."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 4096 if hard == resource.RLIM_INFINITY else min(hard, 4096)
    if most < 1200:
        pytest.skip(f"the system allows {most} open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    yield
    for file in files:
        os.close(file)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_files_may_have_numbers_beyond_a_thousand(many_files, server):
    assert server._control.fileno() > 1024
    child = server.start(TARGET, {"A": "123"})
    assert asked(child, "A") == 3 and child.is_alive()
    assert ended(child) == 0


def test_a_start_that_fails_here_leaves_the_children_of_others(monkeypatch):
    monkeypatch.setattr(_fork_server, "_servers", {})
    first = _fork_server.start(("json",), TARGET, {"A": "1"})
    (server,) = _fork_server._servers.values()

    def no_files(*_):
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="Too many open files"):
        patch.setattr(socket, "socketpair", no_files)
        _fork_server.start(("json",), TARGET, {})
    assert asked(first, "A") == 1
    assert list(_fork_server._servers.values()) == [server]
    assert ended(first) == 0
    server.close()
