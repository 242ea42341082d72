"""Events: a broken callback never costs a checkpoint, and the files of the sinks can be read."""

from __future__ import annotations

import json
import logging
import math
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from sharded_ckpt.events import (
    LANES,
    ChromeTraceSink,
    DeepSpeedMonitorSink,
    Emitter,
    Event,
    JsonLinesSink,
    LoggingSink,
)


def event(kind="committed", step=500, rank=0, **kwargs):
    kwargs = {"term": 1, "serial": 3, "nbytes": 3 << 20, "seconds": 0.25, "t_start": 100.0} | kwargs
    return Event(kind, step, rank, **kwargs)


def broken_callback(event):
    raise RuntimeError("no such dashboard")


class BrokenSink:
    def __call__(self, event):
        raise SystemExit(3)

    def close(self):
        raise OSError("cannot close")


def test_a_broken_callback_is_logged_once_with_its_name_and_the_others_go_on(caplog):
    seen = []
    emitter = Emitter([broken_callback, seen.append, BrokenSink(), partial(broken_callback)])
    for step in range(5):
        emitter.emit(event(step=step))
    emitter.close()
    assert [one.step for one in seen] == [0, 1, 2, 3, 4]
    assert len(caplog.records) == 3
    first, second, third = (record.getMessage() for record in caplog.records)
    assert "broken_callback raised at 'committed' of step 0" in first
    assert "RuntimeError: no such dashboard" in first
    assert "BrokenSink raised" in second and "SystemExit" in second
    assert "functools.partial" in third


def test_a_sink_that_cannot_be_closed_is_logged(caplog):
    Emitter([BrokenSink()]).close()
    assert "BrokenSink could not be closed: OSError: cannot close" in caplog.text


def test_many_threads_log_a_broken_callback_once(caplog):
    emitter = Emitter([broken_callback])
    start = threading.Barrier(8)

    def work(_):
        start.wait(30)
        for _ in range(50):
            emitter.emit(event())

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert len(caplog.records) == 1


def test_logging_says_what_happened_at_the_right_level(caplog):
    caplog.set_level(logging.INFO)
    sink = LoggingSink()
    sink(event())
    sink(event("staged"))
    sink(event("failed", rank=3, nbytes=0, seconds=0, detail={"cause": "ENOSPC"}))
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        ("INFO", "step 500 committed on rank 0, 3.0 MiB in 0.25 s"),
        ("ERROR", "step 500 failed on rank 3 (cause=ENOSPC)"),
    ]


def test_json_lines_hold_every_event_whatever_is_in_it(tmp_path):
    sink = JsonLinesSink(tmp_path / "events-{rank}.jsonl")
    odd = {"loss": math.nan, "big": math.inf, "path": tmp_path, 7: {"a": (1, 2)}, "set": {3}}
    sink(event(rank=2, detail=odd))
    sink.close()
    sink(event(rank=2, step=501))  # opens again, and appends
    lines = (tmp_path / "events-2.jsonl").read_text().splitlines()
    first, second = (json.loads(line, parse_constant=pytest.fail) for line in lines)
    assert first["detail"] == {
        "loss": "nan",
        "big": "inf",
        "path": str(tmp_path),
        "7": {"a": [1, 2]},
        "set": [3],
    }
    assert (first["kind"], first["nbytes"], second["step"]) == ("committed", 3 << 20, 501)


def test_json_lines_of_many_threads_and_sinks_do_not_mix(tmp_path):
    path = tmp_path / "events.jsonl"
    sinks = [JsonLinesSink(path), JsonLinesSink(path)]

    def work(n):
        for i in range(100):
            sinks[n % 2](event(step=i, rank=n, detail={"pad": "x" * 300}))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert sorted((one["rank"], one["step"]) for one in found) == [
        (n, i) for n in range(4) for i in range(100)
    ]


def test_a_trace_is_a_whole_json_array_after_every_event(tmp_path):
    path = tmp_path / "trace.json"
    sink = ChromeTraceSink(path)
    for count, kind in enumerate(LANES, 1):
        sink(event(kind, step=count, rank=count % 2))
        spans = [one for one in json.loads(path.read_text()) if one["ph"] == "X"]
        assert len(spans) == count
    committed = next(one for one in spans if one["name"].startswith("committed"))
    assert (committed["ts"], committed["dur"]) == (100_000_000, 250_000)
    assert committed["pid"] == committed["args"]["rank"]
    lanes = {one["name"].split()[0]: one["tid"] for one in spans}
    assert lanes["planned"] == lanes["staged"] != lanes["written"]
    names = [one for one in json.loads(path.read_text()) if one["ph"] == "M"]
    named = {(one["pid"], one["tid"]) for one in names if one["name"] == "thread_name"}
    assert named == {(one["pid"], one["tid"]) for one in spans}


def test_a_trace_is_continued_by_the_next_job(tmp_path):
    path = tmp_path / "trace.json"
    for step in (1, 2):
        sink = ChromeTraceSink(path)
        sink(event(step=step))
        sink.close()
    spans = [one for one in json.loads(path.read_text()) if one["ph"] == "X"]
    assert [one["args"]["step"] for one in spans] == [1, 2]


def test_a_trace_survives_the_death_of_its_process(tmp_path):
    path = tmp_path / "trace.json"
    script = f"""
import os, signal
from sharded_ckpt.events import ChromeTraceSink, Event
sink = ChromeTraceSink({str(path)!r})
for step in range(20):
    sink(Event("written", step, 0))
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", script], timeout=120)
    assert done.returncode == -signal.SIGKILL
    assert sum(one["ph"] == "X" for one in json.loads(path.read_text())) == 20


def test_a_file_that_is_no_trace_is_left_alone(tmp_path, caplog):
    path = tmp_path / "notes.json"
    path.write_text('{"mine": 1}')
    Emitter([ChromeTraceSink(path)]).emit(event())
    assert path.read_text() == '{"mine": 1}'
    assert "no trace of ours" in caplog.text


def test_two_writers_of_one_trace_are_told_how_to_part(tmp_path, caplog):
    path = tmp_path / "trace.json"
    first = ChromeTraceSink(path)
    first(event(step=1))
    Emitter([ChromeTraceSink(path)]).emit(event(step=2))
    assert "put {rank} into the path" in caplog.text
    assert len([one for one in json.loads(path.read_text()) if one["ph"] == "X"]) == 1


class ListMonitor:
    """The one method that DeepSpeed's monitors have."""

    def __init__(self, enabled):
        self.enabled = enabled
        self.events = []

    def write_events(self, events):
        self.events += events


def test_the_deepspeed_monitor_gets_seconds_and_bytes():
    monitor = ListMonitor(enabled=True)
    sink = DeepSpeedMonitorSink(monitor)
    sink(event())
    sink(event("failed", nbytes=0))
    assert monitor.events == [
        ("Checkpoint/committed_seconds", 0.25, 500),
        ("Checkpoint/committed_nbytes", float(3 << 20), 500),
        ("Checkpoint/failed_seconds", 0.25, 500),
    ]
    silent = ListMonitor(enabled=False)
    DeepSpeedMonitorSink(silent)(event())
    assert silent.events == []


def test_a_real_csv_monitor_takes_our_events(tmp_path):
    pytest.importorskip("deepspeed")
    script = f"""
import deepspeed, torch
from deepspeed.monitor.config import CSVConfig
from deepspeed.monitor.csv_monitor import csvMonitor
from sharded_ckpt.events import DeepSpeedMonitorSink, Event
torch.distributed.init_process_group(
    "gloo", init_method="file://{tmp_path}/meeting", rank=0, world_size=1
)
deepspeed.init_distributed("gloo")
config = CSVConfig(enabled=True, output_path={str(tmp_path)!r}, job_name="job")
DeepSpeedMonitorSink(csvMonitor(config))(Event("committed", 500, 0, seconds=0.25))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    written = (tmp_path / "job" / "Checkpoint_committed_seconds.csv").read_text()
    assert written.split() == ["step,committed_seconds", "500,0.25"]
