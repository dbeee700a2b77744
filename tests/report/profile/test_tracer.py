"""The clock and the trace of steps."""

import time

import torch
from torch.profiler import ProfilerActivity

from nemo_lowprec.report.profile.tracer import Tracer


def names(events):
    return [event.name for event in events if event.kind == "op"]


def test_pauses_belong_to_no_step():
    tracer = Tracer(torch.device("cpu"), traces=True)
    x = torch.ones(4, dtype=torch.float32)
    start, wall = tracer.now(), time.perf_counter()
    tracer.start([ProfilerActivity.CPU])
    x.exp()
    tracer.pause()
    assert not tracer.is_tracing
    x.sin()
    time.sleep(0.3)
    tracer.resume()
    assert tracer.is_tracing
    x.cos()
    events = tracer.stop()
    assert names(events) == ["aten::exp", "aten::cos"]
    assert events == sorted(events, key=lambda event: event.start)
    assert tracer.now() - start < time.perf_counter() - wall - 0.25
    assert tracer.stop() == []


def test_a_pause_without_a_trace():
    tracer = Tracer(torch.device("cpu"), traces=True)
    tracer.resume()
    tracer.pause()
    tracer.resume()
    assert not tracer.is_tracing and tracer.stop() == []


def test_a_process_that_does_not_trace():
    tracer = Tracer(torch.device("cpu"), traces=False)
    tracer.start([ProfilerActivity.CPU])
    assert not tracer.is_tracing and tracer.stop() == []
