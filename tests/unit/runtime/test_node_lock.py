"""One of several at a time, and nothing left behind by the dead."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from mpidist.runtime.node_lock import NodeLock
from mpidist.runtime.shared_memory import SharedFile, map_file


def test_one_holder_at_a_time():
    file = SharedFile(64)
    words = memoryview(file.map()).cast("q")
    first, second = NodeLock(file.path, words, 3), NodeLock(file.path, words, 3)
    assert first.take()
    assert not second.take()
    first.give_back()
    assert second.take()
    assert not first.take()
    second.close()  # gives it back
    words[3] = 0
    assert first.take()
    file.unlink()


def test_threads_count_to_the_sum_of_their_counts():
    file = SharedFile(64)
    words = memoryview(file.map()).cast("q")
    locks = [NodeLock(file.path, words, 0) for _ in range(4)]

    def count(lock: NodeLock) -> None:
        for _ in range(200):
            while not lock.take():
                os.sched_yield()
            before = words[1]
            os.sched_yield()
            words[1] = before + 1
            lock.give_back()

    threads = [threading.Thread(target=count, args=(lock,)) for lock in locks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert words[1] == 800
    file.unlink()


def test_the_lock_of_a_process_that_was_killed_is_free_though_its_mark_stands():
    file = SharedFile(64)
    words = memoryview(file.map()).cast("q")
    ours = NodeLock(file.path, words, 0)
    child = os.fork()
    if child == 0:
        theirs = NodeLock(file.path, memoryview(map_file(file.path)).cast("q"), 0)
        theirs.take()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert words[0] == 1
    assert any(ours.take() for _ in range(1000))
    file.unlink()


def test_a_child_that_outlives_its_killed_parent_holds_nothing():
    file = SharedFile(64)
    words = memoryview(file.map()).cast("q")
    ours = NodeLock(file.path, words, 0)
    told, tell = os.pipe()
    holder = os.fork()
    if holder == 0:
        theirs = NodeLock(file.path, memoryview(map_file(file.path)).cast("q"), 0)
        theirs.take()
        grandchild = os.fork()
        if grandchild == 0:
            signal.pause()
        os.write(tell, str(grandchild).encode())
        os.kill(os.getpid(), signal.SIGKILL)
    grandchild = int(os.read(told, 20))
    os.waitpid(holder, 0)
    try:
        for _ in range(5000):
            if ours.take():
                break
            time.sleep(0.001)
        else:
            pytest.fail("the lock was not given back")
    finally:
        os.kill(grandchild, signal.SIGKILL)
        os.close(told)
        os.close(tell)
        file.unlink()


def test_what_the_holder_writes_is_there_while_it_holds():
    file = SharedFile(64)
    words = memoryview(file.map()).cast("q")
    lock = NodeLock(file.path, words, 2, mark=7)
    assert lock.take()
    assert words[2] == 7
    lock.give_back()
    assert words[2] == 0
    file.unlink()


def test_a_file_that_is_not_there_is_an_os_error(tmp_path):
    with pytest.raises(OSError, match="nowhere"):
        NodeLock(str(tmp_path / "nowhere"), memoryview(bytearray(8)).cast("q"), 0)
