"""The demo: its parts on small inputs, and the command as a user runs it."""

from __future__ import annotations

import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import reference
from libflash.demo import ask, chart, command, measure, memory, report, schedule, standard, table, text
from libflash.demo.measure import Measurement
from libflash.demo.model import HEADS, SHARPNESS, Model
from libflash.demo.table import Comparison

MEGABYTE = 1 << 20


@pytest.fixture(scope="module")
def documentation() -> text.Text:
    return text.load()


def heads_of(seqlen: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((1, seqlen, 3, 16), dtype=np.float32) for _ in range(3)]


def measurement(seqlen: int, method: str = "libflash", **changes) -> Measurement:
    values = {"seconds": 0.25, "memory_bytes": 5_000_000, "error": 1e-6, "error_of_bound": 0.5, "guessed": 0.75}
    return Measurement(method, seqlen, **(values | changes))


# Times


class Clock:
    """A clock that only `sleep` advances."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(measure, "time", made)
    return made


@pytest.mark.parametrize("slow_calls", [0, 1, 5])
def test_a_warm_up_is_not_measured(clock, slow_calls):
    """Slow at first, as a library that starts its threads may be; then fast. One round sees none of the slow calls."""
    durations = iter([0.02] * slow_calls)
    assert measure.median_seconds(lambda: clock.sleep(next(durations, 0.005)), measure.REPEAT_SECONDS) == pytest.approx(0.005)


@pytest.mark.parametrize("method", measure.METHODS)
def test_each_method_is_warm_before_its_memory_and_time_are_measured(clock, monkeypatch, method):
    """The first calls have fewer words, but as many as the threads of NumPy's BLAS start for; the first whole call is counted."""
    seqlen, calls = 512, []

    def attend(q, k, v):
        clock.sleep(0.06 if len(calls) < 2 else 0.01)
        calls.append(q.shape[1])
        return q

    monkeypatch.setattr(measure, "attention_call", lambda name: attend)
    monkeypatch.setattr(measure, "peak_growth", lambda call: (call(), 0))
    monkeypatch.setattr(measure, "compare", lambda *arrays: (0.0, 0.0))
    assert measure.measure(method, seqlen).seconds == pytest.approx(0.01)
    assert calls[:3] == [measure.WARM_UP_WORDS, measure.WARM_UP_WORDS, seqlen]
    assert set(calls[2:]) == {seqlen}


def test_the_warm_up_uses_the_threads_of_blas():
    """OpenBLAS computes products of up to 65536 * 4 multiplications with one thread."""
    assert measure.WARM_UP_WORDS**2 * Model(1).embedding.shape[1] > 65536 * 4


def test_a_long_call_counts_alone():
    assert measure.median_seconds(lambda: pytest.fail("called again"), 5 * measure.REPEAT_SECONDS) == 5 * measure.REPEAT_SECONDS


# The text


def test_joining_the_words_gives_the_text_back():
    assert "".join(text.split("a  b\n\n   c... ``x``(1)")) == " a b c... ``x``(1)"


def test_words_of_the_documentation(documentation):
    assert len(documentation.words) == len(documentation.ids) > 50_000
    assert [documentation.vocabulary[i] for i in documentation.ids[:100]] == documentation.words[:100]
    for topic in ("try", "with"):
        start = documentation.starts[documentation.topics.index(topic)]
        assert documentation.topic_at(start) == topic
        assert documentation.topic_at(start - 1) != topic


def test_the_passage_is_told_twice(documentation):
    end, distance = text.passage(documentation)
    assert distance is not None
    assert documentation.words[end - text.TAIL : end] == documentation.words[end - distance - text.TAIL : end - distance]
    assert documentation.topic_at(end - 1) == text.LATER_TOPIC


def test_a_text_that_tells_nothing_twice_is_read_to_its_end():
    words = [" a", " b"]
    once = text.Text(words, np.array([0, 1]), words, ["x"], [0], 4)
    assert text.passage(once) == (2, None)


def test_unknown_words_of_a_phrase_are_left_out(documentation):
    known = documentation.encode("The try statement")
    assert documentation.encode("The Qwertyuiop try statement").tolist() == known.tolist()
    assert len(documentation.encode("Qwertyuiop")) == 0


# The model


def test_contexts_tell_word_order_and_distance_apart():
    model = Model(50)
    contexts = model.contexts(np.array([7, 8, 9, 30, 8, 7, 9, 40, 7, 8, 9]))
    same, swapped = (float(contexts[2, 2] @ contexts[i, 2]) for i in (10, 6))
    assert same == pytest.approx(float(contexts[2, 2] @ contexts[2, 2]), rel=1e-5)
    assert swapped < 0.8 * same


@pytest.mark.parametrize("method", ["standard", "libflash"])
def test_the_model_continues_a_passage_that_it_has_read_before(method):
    rng = np.random.default_rng(1)
    ids = rng.integers(0, 500, 700)
    ids[600:] = ids[100:200]
    model = Model(500)
    out = measure.attention_call(method)(*model.queries_keys_values(ids))
    guesses = model.next_word(out[0, 610:-1])
    assert (guesses == ids[611:]).mean() > 0.95


# Standard attention and the float64 reference


def test_standard_attention_is_attention():
    q, k, v = heads_of(70)
    expected, _ = reference.forward(q, k, v, causal=True, softmax_scale=0.3)
    np.testing.assert_allclose(standard.standard_attention(q, k, v, 0.3), expected, atol=2e-6)


def test_exact_rows_are_those_of_the_reference():
    q, k, v = heads_of(70)
    expected, _ = reference.forward(q, k, v, causal=True, softmax_scale=0.3)
    rows = np.array([0, 1, 33, 69])
    exact, bound = standard.exact_rows(q[0, rows], k[0], v[0], 0.3, rows)
    np.testing.assert_allclose(exact, expected[0, rows], atol=1e-13)
    assert (bound > 0).all()
    assert (bound < 1e-4).all()


def test_comparison_accepts_rounding_and_refuses_a_forgotten_key():
    q, k, v = heads_of(400)
    right = standard.standard_attention(q, k, v, SHARPNESS)
    assert measure.compare(right[0], q[0], k[0], v[0])[1] < 1
    forgotten = k.copy()
    forgotten[0, 5] = 0
    wrong = standard.standard_attention(q, forgotten, v, SHARPNESS)
    assert measure.compare(wrong[0], q[0], k[0], v[0])[1] > 10
    right[0, 0, 0, 0] = np.nan
    assert measure.compare(right[0], q[0], k[0], v[0]) == (np.inf, np.inf)


# Memory


def test_peak_growth_sees_what_is_freed_again():
    code = (
        "import numpy as np\nfrom libflash.demo.memory import peak_growth\n"
        "def call():\n  np.ones(50 << 20, np.uint8)\n  return 1\n"
        "print(peak_growth(call)[1], peak_growth(lambda: None)[1])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    grown, nothing = (int(word) for word in done.stdout.split())
    assert 49 * MEGABYTE < grown < 60 * MEGABYTE
    if pathlib.Path("/proc/self/clear_refs").exists():
        assert nothing < 4 * MEGABYTE


def test_memory_of_a_missing_entry():
    assert memory.proc_entry(pathlib.Path("/proc/self/status"), "NoSuchName") is None
    assert memory.proc_entry(pathlib.Path("/no/such/file"), "VmRSS") is None


def test_libflash_takes_less_memory_than_the_scores():
    standard_, own = (measure.measure_apart(method, 2048, 2, lambda: None) for method in ("standard", "libflash"))
    assert standard_.memory_bytes > standard.scores_bytes(2048, HEADS) > 4 * own.memory_bytes
    assert standard_.error_of_bound < 1
    assert own.error_of_bound < 1
    assert standard_.guessed == pytest.approx(own.guessed, abs=0.02)


# The choice of lengths


@pytest.mark.parametrize(
    ("longest", "quick", "expected"),
    [
        (None, False, [512, 1024, 2048, 4096, 8192, 16384, 32768]),
        (None, True, [512, 1024, 2048, 4096]),
        (1500, False, [512, 1024, 1500]),
        (512, False, [512]),
        (10**9, False, [512, 1024, 2048, 4096, 8192, 16384, 32768, 60_000]),
    ],
)
def test_lengths(longest, quick, expected):
    assert schedule.lengths(60_000, longest, quick) == expected


def test_a_length_is_left_out_for_memory_or_time(monkeypatch):
    monkeypatch.setattr(schedule, "available_bytes", lambda: 2 * standard.scores_bytes(4096, HEADS))
    slow = measurement(2048, seconds=schedule.SECONDS_LIMIT / 3)
    assert schedule.reason_to_skip("standard", 4096, None, patient=False) == ""
    assert schedule.reason_to_skip("standard", 8192, None, patient=True) == "scores: 1.07 GB"
    assert schedule.reason_to_skip("libflash", 8192, None, patient=False) == ""
    assert schedule.reason_to_skip("libflash", 4096, slow, patient=False) == "would take 16.00 s"
    assert schedule.reason_to_skip("libflash", 4096, slow, patient=True) == ""


def test_a_process_that_dies_is_a_row_of_the_table(monkeypatch, capsys):
    monkeypatch.setattr(schedule, "measure_apart", dying)
    rows = list(schedule.comparisons_of([512], threads=1, patient=False))
    assert rows[0].libflash == "failed: out of memory"
    assert "failed: out of memory" in capsys.readouterr().out
    assert report.failures(rows, []) == ["512 words: failed: out of memory"]


def dying(*_):
    raise measure.MeasurementFailed(measure.failure(1, "Traceback ...\nnumpy._core._exceptions._ArrayMemoryError: Unable"))


def test_failures_are_named():
    assert measure.failure(-9, "") == "ended by signal 9: out of memory?"
    assert measure.failure(1, "Traceback\nValueError: no") == "ValueError: no"
    assert measure.failure(3, "") == "exit code 3"


# Output


def test_table_lines_are_of_one_width():
    rows = [
        Comparison(512, measurement(512), measurement(512, seconds=0.00123, memory_bytes=1)),
        Comparison(16384, "scores: 4.29 GB", measurement(16384, seconds=2)),
        Comparison(32768, "scores: 17.18 GB", "would take 16.00 s"),
    ]
    lines = [table.line(table.HEADINGS), table.RULE, *(table.comparison_line(row) for row in rows)]
    assert {len(line) for line in lines} == {len(table.RULE)}
    assert "203.3 x" in lines[2]


@pytest.mark.parametrize(("seconds", "shown"), [(0.00123, "1.23 ms"), (0.0999, "99.9 ms"), (0.12, "120 ms"), (3, "3.00 s")])
def test_times(seconds, shown):
    assert table.time_text(seconds) == shown


@pytest.mark.parametrize(("count", "shown"), [(0, "0.0 MB"), (1.5e6, "1.5 MB"), (2.5e8, "250 MB"), (1.07e9, "1.07 GB")])
def test_sizes(count, shown):
    assert table.bytes_text(count) == shown


def test_wrong_numbers_are_said_and_fail_the_command(capsys):
    rows = [Comparison(512, measurement(512), measurement(512, error_of_bound=float("inf")))]
    assert "WRONG" in report.conclusion(rows, None)
    assert command.verdict(rows, []) == 1
    assert "512 words" in capsys.readouterr().err
    answer = ask.Answer(" x", "try", 0.1, error_of_bound=3.0)
    assert command.verdict([], [answer]) == 1
    assert command.verdict([Comparison(512, measurement(512), measurement(512))], []) == 0


def test_conclusion_says_what_a_longer_context_gains():
    rows = [
        Comparison(8192, "scores", measurement(8192, guessed=0.25)),
        Comparison(16384, "scores", measurement(16384, guessed=0.9)),
    ]
    text_ = " ".join(report.conclusion(rows, 11_000).split())
    assert "11,000 words earlier" in text_
    assert "With a context of 8192 words 25 % of the next words are guessed right, with 16384 words 90 %" in text_
    assert report.times(0.5) == "2.0 times slower"


@pytest.mark.parametrize("standard_runs", [True, False])
def test_chart_is_drawn(tmp_path, standard_runs):
    pytest.importorskip("matplotlib")
    first = measurement(512, "standard") if standard_runs else "scores: 4 GB"
    rows = [Comparison(512, first, measurement(512)), Comparison(1024, "scores: 4 GB", measurement(1024, memory_bytes=0))]
    chart.save(rows, 700, "title", tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_missing_matplotlib_is_said_in_a_line(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    command.draw([Comparison(512, "", measurement(512))], None, tmp_path / "chart.png")
    assert "matplotlib" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_long_lists_of_kernels_are_shortened(monkeypatch):
    lines = [
        "operation   forward",
        "kernel      one, backend cpu",
        "threads     2",
        "not         another device",
        "              a, b, c,",
        "              d, e, f",
        "not         later",
        "              g, h",
    ]
    monkeypatch.setattr(report.libflash, "explain", lambda *_, **__: "\n".join(lines))
    assert report.choice(4) == [
        "kernel      one, backend cpu",
        "not         another device: a and 5 others",
        "not         later: g, h",
    ]


# Continuing a phrase


def test_a_phrase_is_continued_from_the_text(documentation):
    phrase = "The try statement specifies exception handlers"
    reader = ask.Reader(documentation, Model(len(documentation.vocabulary)), spare=64)
    answer = reader.ask(phrase, 8)
    assert answer.words == " and/or cleanup code for a group"
    assert answer.topic in ("try", "compound")
    assert answer.error_of_bound < 1
    assert reader.ask(phrase, 8).words == answer.words
    with pytest.raises(ValueError, match="Qwertyuiop"):
        reader.ask("Qwertyuiop", 1)


# The command


def run_demo(*arguments: str, cwd: pathlib.Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "libflash", "demo", *arguments], cwd=cwd, capture_output=True, text=True, check=False, timeout=300
    )


def test_the_command(tmp_path):
    done = run_demo("--max-seqlen", "1024", "--threads", "2", "--ask", "Qwertyuiop", "--out", "figure.png", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    rows = re.findall(r"^ *(512|1024) .* x +\d+ %$", done.stdout, re.MULTILINE)
    assert rows == ["512", "1024"]
    assert re.search(r"^backend +cpu, because", done.stdout, re.MULTILINE)
    assert re.search(r"^kernel +forward_cpu_\w+", done.stdout, re.MULTILINE)
    assert re.search(r"^numbers +the same", done.stdout, re.MULTILINE)
    assert "the text contains none of the words of 'Qwertyuiop'" in done.stdout
    pytest.importorskip("matplotlib")
    assert [path.name for path in tmp_path.iterdir()] == ["figure.png"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--max-seqlen", "511"], "--max-seqlen"),
        (["--threads", "0"], "--threads"),
        (["--threads", "x"], "--threads"),
        (["--out", "no/such/folder/chart.png"], "--out"),
        (["--no-such-option"], "--no-such-option"),
    ],
)
def test_bad_options(tmp_path, arguments, named):
    done = run_demo(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert named in done.stderr
    assert "Traceback" not in done.stderr


def test_interrupt_ends_it_with_one_line(tmp_path):
    # A background process starts with SIGINT ignored.
    accept_interrupts = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    code = f"{accept_interrupts}; import runpy; runpy.run_module('libflash', run_name='__main__')"
    command_line = [sys.executable, "-c", code, "demo", "--quick"]
    with subprocess.Popen(
        command_line, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as demo:
        assert demo.stdout is not None
        for line in demo.stdout:
            if line.startswith("---"):  # the table has begun, and a measurement runs
                break
        time.sleep(0.5)
        os.killpg(demo.pid, signal.SIGINT)  # to the whole process group, like a terminal
        _, failure = demo.communicate(timeout=60)
    assert demo.returncode == 130, failure
    assert failure.split() == ["libflash", "demo:", "interrupted"]


def test_a_reader_that_leaves_early_is_no_error(tmp_path):
    line = f"{sys.executable} -m libflash demo --max-seqlen 512 | head -n 1"
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert done.stdout.startswith("libflash ")
    assert done.stderr == ""


def test_without_numpy_it_says_so():
    code = "import sys; sys.modules['numpy'] = None; from libflash import demo; sys.exit(demo.main([]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "libflash demo: needs numpy, which this Python does not have\n"
