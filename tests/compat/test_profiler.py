"""What links the events of torch's profiler."""

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from nemo_lowprec.compat.profiler import Event, trace_of


def test_operations_ranges_and_nodes_of_autograd():
    layer, x = nn.Linear(4, 4), torch.randn(2, 4)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        with record_function("mine"):
            loss = layer(x).sum()
        loss.backward()
    events = trace_of(profiler)
    assert all(isinstance(event, Event) and event.start <= event.end for event in events)
    assert [event.start for event in events] == sorted(event.start for event in events)
    (mine,) = (event for event in events if event.kind == "range")
    assert mine.name == "mine"
    forward = next(event for event in events if event.name == "aten::addmm")
    node = next(event for event in events if event.name.endswith("evaluate_function: AddmmBackward0"))
    assert forward.kind == node.kind == "op" and mine.start <= forward.start <= forward.end <= mine.end
    assert forward.sequence == node.sequence >= 0
    assert node.forward_thread == forward.thread and not forward.forward_thread
