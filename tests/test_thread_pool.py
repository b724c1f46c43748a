"""The library's thread pool: number of threads, sleep between calls, fork, unloading and the end of the process."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
import textwrap

import pytest

TESTS = pathlib.Path(__file__).resolve().parent

PRELUDE = """
import ctypes, json, os, sys, threading, time
import numpy as np
import libflash

def tasks():
    names = {}
    for task in os.listdir("/proc/self/task"):
        try:
            if open(f"/proc/self/task/{task}/comm").read() == "libflash\\n":
                names[task] = dict(line.split(":\\t", 1) for line in open(f"/proc/self/task/{task}/status").read().splitlines())
        except (FileNotFoundError, ProcessLookupError):  # a thread of Python that has ended since it was listed
            pass
    return names

# The threads of the library as soon as `count` of them sleep. A new thread gets its name when it first runs.
def sleeping(count):
    end = time.monotonic() + 60
    while sum(task["State"].startswith("S") for task in tasks().values()) < count and time.monotonic() < end:
        time.sleep(0.01)
    return tasks()

x = np.random.default_rng(0).standard_normal((2, 600, 4, 32)).astype("float32")
def call(threads):
    libflash.set_num_threads(threads)
    return libflash.attention(x, x, x, causal=True)
"""


def run(code: str, **environment: str) -> object:
    """The JSON that the code prints."""
    script = PRELUDE + textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"{done.returncode}: {done.stderr}"
    return json.loads(done.stdout.splitlines()[-1])  # an editable install may print what it builds


def test_threads_are_kept_and_not_more_than_requested() -> None:
    code = """
        counts = [len(tasks())]
        for threads, kept in ((1, 0), (4, 3), (2, 3), (4, 3), (4, 3), (4, 3), (6, 5), (4, 5)):
            call(threads)
            counts.append(len(sleeping(kept)))
        print(json.dumps(counts))
    """
    assert run(code) == [0, 0, 3, 3, 3, 3, 3, 5, 5]


# Every new thread begins a second late.
LATE_THREADS = """
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>
typedef void* (*routine)(void*);
struct late { routine start; void* argument; };
static void* begin(void* data) {
    struct late late = *(struct late*)data;
    free(data);
    sleep(1);
    return late.start(late.argument);
}
int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, routine start, void* argument) {
    int (*create)(pthread_t*, const pthread_attr_t*, routine, void*);
    *(void**)&create = dlsym(RTLD_NEXT, "pthread_create");
    struct late* late = malloc(sizeof *late);
    *late = (struct late){start, argument};
    return create(thread, attributes, begin, late);
}
"""


@pytest.fixture(scope="module")
def late_threads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process whose threads begin late."""
    if shutil.which("gcc") is None:
        pytest.skip("no gcc")
    folder = tmp_path_factory.mktemp("late_threads")
    (folder / "late.c").write_text("#define _GNU_SOURCE\n" + LATE_THREADS)
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-Wall", "-Werror", folder / "late.c", "-o", folder / "late.so", "-ldl", "-pthread"],
        check=True,
    )
    return {"LD_PRELOAD": str(folder / "late.so"), "OPENBLAS_NUM_THREADS": "1"}


def test_threads_that_have_not_begun_serve_the_next_call(late_threads: dict[str, str]) -> None:
    """Calls one after the other need one thread, though it begins only after them."""
    code = """
        for _ in range(5):
            call(2)
        sleeping(1)
        time.sleep(1.5)
        print(json.dumps(len(tasks())))
    """
    assert run(code, **late_threads) == 1


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one processor has no more than one thread")
def test_calls_at_the_same_time_start_a_thread_each(late_threads: dict[str, str]) -> None:
    code = """
        x = np.ones((1, 8000, 4, 64), "float32")
        libflash.set_num_threads(2)
        together = threading.Barrier(2)
        def work():
            together.wait()
            libflash.attention(x, x, x)
        callers = [threading.Thread(target=work) for _ in range(2)]
        [caller.start() for caller in callers]
        [caller.join() for caller in callers]
        print(json.dumps(len(sleeping(2))))
    """
    assert run(code, **late_threads) == 2


def test_threads_sleep_between_calls() -> None:
    code = """
        call(4)
        sleeping(3)
        before = time.process_time()
        time.sleep(1)
        print(json.dumps([time.process_time() - before, [task["State"] for task in tasks().values()]]))
    """
    used, states = run(code)
    assert used < 0.05
    assert states == ["S (sleeping)"] * 3


def test_many_callers_share_the_threads() -> None:
    """Eight callers with four threads each: right results, and no more threads than one call requests, or than processors."""
    code = """
        expected = call(1)
        libflash.set_num_threads(4)
        wrong = []
        def work():
            for _ in range(20):
                wrong.append(int((libflash.attention(x, x, x, causal=True) != expected).sum()))
        callers = [threading.Thread(target=work) for _ in range(8)]
        [caller.start() for caller in callers]
        [caller.join() for caller in callers]
        print(json.dumps([len(wrong), sum(wrong), len(tasks()) <= max(os.cpu_count(), 4)]))
    """
    assert run(code) == [160, 0, True]


def test_threads_block_signals_and_follow_the_callers_affinity() -> None:
    code = """
        call(4)
        sleeping(3)
        mine = sorted(os.sched_getaffinity(0))
        masks = []
        for allowed in ({mine[0]}, {mine[-1]}, set(mine)):
            os.sched_setaffinity(0, allowed)
            for _ in range(50):
                call(4)
            own = dict(line.split(":\\t", 1) for line in open("/proc/thread-self/status").read().splitlines())
            masks.append([task["Cpus_allowed"] == own["Cpus_allowed"] for task in tasks().values()])
        blocked = [int(task["SigBlk"], 16) | 1 << 8 | 1 << 18 for task in tasks().values()]
        print(json.dumps([masks, [mask & 0x7fffffff == 0x7fffffff for mask in blocked]]))
    """
    masks, blocked = run(code)
    assert blocked == [True] * 3
    assert [any(some) for some in masks] == [True] * 3  # a thread that joined no call keeps its mask


def test_threads_calculate_as_their_caller_does() -> None:
    """With the rounding mode of the calling thread, also if it changed after the threads were started."""
    code = """
        call(4)
        libm = ctypes.CDLL("libm.so.6")
        libm.fesetround(libm.fegetround() ^ 0x800)
        results = [call(threads) for threads in (1, 4, 4, 4)]
        print(json.dumps([bool((result == results[0]).all()) for result in results]))
    """
    assert run(code) == [True] * 4


@pytest.mark.filterwarnings("ignore")
def test_fork_while_other_threads_calculate() -> None:
    code = """
        import warnings
        warnings.simplefilter("ignore")
        expected = call(3)
        stop = threading.Event()
        def work():
            while not stop.is_set():
                libflash.attention(x, x, x)
        callers = [threading.Thread(target=work) for _ in range(3)]
        [caller.start() for caller in callers]
        ends = []
        for _ in range(10):
            child = os.fork()
            if child == 0:
                fresh = len(tasks())
                same = (call(3) == expected).all() and (call(1) == expected).all()
                os._exit(0 if same and fresh == 0 and len(sleeping(2)) == 2 else 3)
            ends.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        stop.set()
        [caller.join() for caller in callers]
        print(json.dumps([ends, bool((call(3) == expected).all())]))
    """
    assert run(code) == [[0] * 10, True]


def test_the_process_ends_while_a_thread_calculates() -> None:
    code = """
        def work():
            while True:
                call(4)
        call(4)
        sleeping(3)
        threading.Thread(target=work, daemon=True).start()
        time.sleep(0.3)
        print(json.dumps(len(tasks())))
    """
    assert run(code) == 3


def test_unloading_leaves_the_threads_alone(tmp_path: object) -> None:
    """dlclose() after a call with threads: the library stays loaded. Without such a call it is unloaded."""
    code = f"""
        import _ctypes, pathlib, shutil
        sys.path[:0] = {[str(TESTS / "support"), str(TESTS / "capi")]!r}
        import abi
        def loaded(path):
            return str(path) in open("/proc/self/maps").read()
        found = []
        for threads in (1, 4):
            path = pathlib.Path({str(tmp_path)!r}) / f"lib{{threads}}.so"
            shutil.copy(abi.library_path(), path)
            library = abi.load(path)
            outs = (abi.Tensor * 2)(abi.tensor(x), abi.tensor(x))
            lse, out = np.zeros((2, 4, 600), "float32"), np.zeros_like(x)
            lses = (abi.Tensor * 2)(abi.tensor(lse), abi.tensor(lse))
            options = abi.options(abi.MergeOptions, num_threads=threads)
            merge = library.flash_attention_merge
            assert merge(outs, lses, 2, abi.pointer(abi.tensor(out)), None, ctypes.byref(options), None) == 0
            assert (out == x).all()
            handle = library._handle
            del merge, library
            _ctypes.dlclose(handle)
            found.append([loaded(path), len(sleeping(threads // 4))])
        print(json.dumps(found))
    """
    (without, none), (with_threads, some) = run(code)
    assert (without, none) == (False, 0)
    assert with_threads
    assert some > 0


def test_a_bad_environment_variable_is_reported_by_every_call() -> None:
    code = """
        def text(function):
            try:
                return function() and "nothing"
            except libflash.InvalidError as error:
                return str(error)
        got = [text(libflash.get_num_threads), text(lambda: libflash.attention(x, x, x)), text(libflash.info)]
        print(json.dumps([got, bool(np.isfinite(call(2)).all())]))
    """
    texts, works = run(code, LIBFLASH_NUM_THREADS="99999")
    rule = 'LIBFLASH_NUM_THREADS: this environment variable must be a whole number from 1 to 4096 ("99999")'
    assert texts == [rule] * 3
    assert works, "a number that the program sets is used"


def test_torch_tensors_use_no_more_threads_than_torch() -> None:
    pytest.importorskip("torch")
    code = """
        import torch
        t = torch.from_numpy(np.ones((8, 500, 8, 64), "float32"))
        def used(array):
            text = libflash.explain(array, array, array)
            return int(next(line for line in text.splitlines() if line.startswith("threads")).split()[1])
        def helpers():
            libflash.attention(t, t, t)
            return len(tasks())
        got = []
        for threads in (1, 3, 9):
            torch.set_num_threads(threads)
            got.append([used(t), used(t.numpy())])
        torch.set_num_threads(1)
        alone = helpers()
        libflash.set_num_threads(5)
        print(json.dumps([got, alone, used(t), helpers()]))
    """
    assert run(code, LIBFLASH_NUM_THREADS="4") == [[[1, 4], [3, 4], [4, 4]], 0, 5, 4]
