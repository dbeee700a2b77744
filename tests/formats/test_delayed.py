"""Delayed scaling, by hand-made histories."""

import io
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_lowprec.formats import E4M3, E5M2, DelayedScaling, cast, decode


def added(scaling, name, fmt):
    scaling.add_all({name: fmt})
    return scaling.slots[name]


def table(**options):
    scaling = DelayedScaling(**{"history_len": 4, **options})
    return scaling, added(scaling, "x", E4M3)


def step(scaling, slot, *amaxes):
    """One optimizer step that sees tensors of these amaxes; returns the operand's scale afterwards."""
    for amax in amaxes:
        slot.record(torch.tensor(float(amax)))
    scaling.update()
    return slot.scale.item()


def use(slot, amax):
    """The scale that a tensor of this amax gets."""
    return slot.current_scale(torch.tensor(float(amax))).item()


def test_first_call_is_scaled_by_its_own_amax():
    scaling, slot = table(margin=1)
    assert use(slot, 2.0) == 448 / 2 / 2
    assert use(slot, 7.0) == 448 / 7 / 2
    step(scaling, slot, 2.0)
    assert use(slot, 7.0) == 448 / 2 / 2  # the history's from now on


def test_gradients_of_1e6th_do_not_vanish_in_the_first_step():
    scaling = DelayedScaling()
    slot = added(scaling, "dy", E5M2)
    dy = torch.tensor([1e-6, -5e-7])
    scale = slot.current_scale(dy.abs().max())
    torch.testing.assert_close(decode(cast(dy * scale, E5M2)) / scale, dy, rtol=1e-6, atol=0)


def test_max_looks_at_the_whole_window_and_lets_old_amaxes_slide_out():
    scaling, slot = table(history_len=3)
    scales = [step(scaling, slot, a) for a in (8.0, 1.0, 2.0, 1.0, 1.0, 1.0)]
    assert scales == [448 / a for a in (8, 8, 8, 2, 2, 1)]


def test_most_recent_looks_at_the_last_step_only():
    scaling, slot = table(algo="most_recent")
    assert [step(scaling, slot, a) for a in (8.0, 1.0, 2.0)] == [448 / 8, 448 / 1, 448 / 2]


def test_history_of_one_step_is_most_recent():
    longest, a = table(history_len=1)
    recent, b = table(algo="most_recent")
    for amax in (3.0, 0.5, 7.0):
        assert step(longest, a, amax) == step(recent, b, amax)


def test_margin_halves_scales():
    scaling, slot = table(margin=2)
    assert step(scaling, slot, 7.0) == 448 / 7 / 4


def test_formats_have_their_own_largest_value():
    scaling, x = table()
    dy = added(scaling, "dy", E5M2)
    x.record(torch.tensor(2.0))
    dy.record(torch.tensor(2.0))
    scaling.update()
    assert (x.scale.item(), dy.scale.item()) == (224.0, 28672.0)


def test_interval_renews_scales_every_so_many_steps_but_records_each():
    scaling, slot = table(interval=3)
    scales = [step(scaling, slot, a) for a in (8.0, 4.0, 2.0, 1.0, 1.0, 1.0)]
    assert scales == [1.0, 1.0, 56.0, 56.0, 56.0, 448 / 2]  # 8 and 4 have left the window of 4 at the second renewal
    late, slot = table(interval=3)
    step(late, slot, 8.0)
    assert use(slot, 2.0) == 224.0  # still without a scale of its own


def test_zero_amax_keeps_the_scale_and_an_unseen_operand_stays_on_current_scaling():
    scaling, slot = table(algo="most_recent")
    assert step(scaling, slot, 2.0) == 224.0
    assert step(scaling, slot, 0.0) == 224.0
    assert step(scaling, slot) == 224.0
    unseen = added(scaling, "unseen", E4M3)
    step(scaling, slot, 1.0)
    assert unseen.cold and use(unseen, 14.0) == 32.0 and not slot.cold


def test_only_a_step_in_which_an_operand_is_seen_at_last_reads_back(monkeypatch):
    reads = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: reads.append(tensor) or tolist(tensor))
    scaling, slot = table()
    never, late = added(scaling, "never", E4M3), added(scaling, "late", E4M3)
    counts = []
    for i in range(5):
        if i == 3:
            late.record(torch.tensor(2.0))
        step(scaling, slot, 1.0)
        counts.append(len(reads))
    assert counts == [1, 1, 1, 2, 2]
    assert never.cold and not late.cold and use(late, 1.0) == 224.0


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_non_finite_amax_keeps_the_scale_and_does_not_stay_in_the_window(bad):
    scaling, slot = table()
    assert step(scaling, slot, 2.0) == 224.0
    assert step(scaling, slot, 1.0, bad) == 224.0
    assert step(scaling, slot, 4.0) == 112.0
    recent, slot = table(algo="most_recent")
    step(recent, slot, 2.0)
    assert step(recent, slot, bad) == 224.0


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_non_finite_first_amax_leaves_the_operand_on_current_scaling(bad):
    scaling, slot = table()
    step(scaling, slot, bad)
    assert use(slot, 2.0) == 224.0
    step(scaling, slot, 8.0)
    assert use(slot, 2.0) == 56.0


def test_micro_batches_fold_into_one_amax():
    scaling, slot = table()
    assert step(scaling, slot, 1.0, 8.0, 2.0) == 56.0
    assert sorted(scaling.state_dict()["operands"]["x"]["amax_history"].tolist()) == [0.0, 0.0, 0.0, 8.0]


def test_discard_forgets_the_amaxes_of_a_skipped_step():
    scaling, slot = table()
    step(scaling, slot, 2.0)
    before = scaling.state_dict()
    slot.record(torch.tensor(1e9))
    scaling.discard()
    after = scaling.state_dict()
    assert after["updates"] == before["updates"] == 1
    assert torch.equal(after["operands"]["x"]["amax_history"], before["operands"]["x"]["amax_history"])
    assert step(scaling, slot, 4.0) == 112.0


@pytest.mark.parametrize("steps", [0, 1, 3, 5])
@pytest.mark.parametrize("algo", ["max", "most_recent"])
@pytest.mark.parametrize("skipped", [False, True])
def test_an_update_that_the_device_may_skip(steps, algo, skipped):
    """It leaves what an update leaves, or what a discarded step leaves, before and after the host knows."""
    states = []
    for knows in (True, False):
        scaling = DelayedScaling(history_len=3, algo=algo)
        slot = added(scaling, "a.input", E4M3)
        for amax in range(1, steps + 1):
            step(scaling, slot, float(amax))
        slot.record(torch.tensor(math.inf if skipped else 7.0))
        if not knows:
            scaling.update(torch.tensor(float(skipped)))
        elif skipped:
            scaling.discard()
        else:
            scaling.update()
        states.append([scaling.scale.tolist(), scaling.history.tolist()])
        if steps:  # else the scale is the amax's own, and a skipped step is taken back at once
            slot.record(torch.tensor(2.0))  # of the next forward pass
        if skipped and not knows:
            scaling.take_back()
        states[-1] += [str(scaling.state_dict()), slot.cold, slot.recorded]
        step(scaling, slot, 0.5)
        states[-1].append(str(scaling.state_dict()))
    assert states[0] == states[1]


def test_a_history_that_starts_anew_before_the_host_knows_stays_new():
    scaling = DelayedScaling(history_len=3)
    slot = added(scaling, "a.input", E4M3)
    step(scaling, slot, 1.0)
    slot.record(torch.tensor(math.inf))
    scaling.update(torch.ones(()))
    slot.restart()  # the weight of the layer was written
    scaling.take_back()
    assert slot.cold and scaling.updates == 1


def test_update_without_operands_does_nothing():
    scaling = DelayedScaling()
    scaling.update()
    assert scaling.state_dict() == {"updates": 0, "operands": {}}


def test_slots_see_their_own_column_after_operands_were_added():
    scaling, x = table()
    step(scaling, x, 2.0)
    x.record(torch.tensor(4.0))
    y = added(scaling, "y", E5M2)
    assert added(scaling, "x", E4M3) is x
    scaling.add_all({"x": E4M3, "z": E4M3})
    assert x.scale.item() == 224.0 and not x.cold and y.cold
    y.record(torch.tensor(1.0))
    scaling.update()
    assert x.scale.item() == 112.0 and y.scale.item() == 57344.0 and scaling.slots["z"].cold


def saved(scaling):
    """Through a file, as a checkpoint reads it."""
    file = io.BytesIO()
    torch.save(scaling.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("algo", ["max", "most_recent"])
@pytest.mark.parametrize("steps", [0, 1, 3, 4, 6])
def test_state_goes_on_bit_for_bit(steps, algo):
    amaxes = torch.rand(12, generator=torch.Generator().manual_seed(steps)).tolist()
    straight, a = table(algo=algo, interval=2, margin=1)
    for amax in amaxes[:steps]:
        step(straight, a, amax)
    a.record(torch.tensor(0.3))  # saved in the middle of accumulation
    resumed, b = table(algo=algo, interval=2, margin=1)
    resumed.load_state_dict(saved(straight))
    for amax in amaxes[steps:]:
        assert use(a, amax) == use(b, amax)
        assert step(straight, a, amax) == step(resumed, b, amax)


def test_loading_a_longer_history_keeps_its_newest_entries():
    long, a = table(history_len=4)
    for amax in (16.0, 8.0, 2.0, 4.0, 1.0):
        step(long, a, amax)
    short, b = table(history_len=2)
    short.load_state_dict(long.state_dict())
    assert short.state_dict()["operands"]["x"]["amax_history"].tolist() == [4.0, 1.0]
    assert b.scale.item() == 448 / 8  # as it was saved
    assert step(short, b, 2.0) == 448 / 2


def test_loading_a_shorter_history_pads_it():
    short, a = table(history_len=2)
    for amax in (8.0, 2.0, 4.0):
        step(short, a, amax)
    long, b = table(history_len=5)
    long.load_state_dict(short.state_dict())
    assert long.state_dict()["operands"]["x"]["amax_history"].tolist() == [0.0, 0.0, 0.0, 2.0, 4.0]
    assert [step(long, b, 1.0) for _ in range(5)] == [448 / 4] * 4 + [448.0]


def test_loading_ignores_operands_it_does_not_have_and_starts_those_not_saved_afresh():
    other = DelayedScaling(4)
    step(other, added(other, "gone", E4M3), 3.0)
    scaling, slot = table()
    step(scaling, slot, 2.0)
    scaling.load_state_dict(other.state_dict())
    assert set(scaling.state_dict()["operands"]) == {"x"}
    assert slot.cold and use(slot, 1.0) == 448.0
    assert scaling.state_dict()["operands"]["x"]["amax_history"].tolist() == [0.0] * 4


def test_loading_the_scale_of_another_format_and_margin_converts_it():
    hybrid = DelayedScaling(4)
    step(hybrid, added(hybrid, "dy", E5M2), 2.0)
    e4m3 = DelayedScaling(4, margin=1)
    slot = added(e4m3, "dy", E4M3)
    e4m3.load_state_dict(hybrid.state_dict())
    assert slot.scale.item() == 448 / 2 / 2  # E5M2's 28672 would have clipped every gradient


def test_histories_follow_to_another_device():
    scaling, slot = table()
    step(scaling, slot, 2.0)
    before = scaling.state_dict()
    scaling.to(torch.device("cpu"))
    assert str(scaling.state_dict()) == str(before) and slot.scale.item() == 224.0


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.floats(0, 1e6, width=32), max_size=3), min_size=1, max_size=12),
    st.integers(1, 5),
    st.sampled_from(["max", "most_recent"]),
    st.integers(1, 3),
    st.integers(-1, 2),
)
def test_scale_follows_the_rules_for_any_history(steps, history_len, algo, interval, margin):
    scaling, slot = table(history_len=history_len, algo=algo, interval=interval, margin=margin)
    history, scale = [], 1.0
    for number, amaxes in enumerate(steps, 1):
        got = step(scaling, slot, *amaxes)
        history = [*history, max(amaxes, default=0.0)][-history_len:]
        window = max(history) if algo == "max" else history[-1]
        if number % interval == 0 and window > 0:
            scale = min(448 / window / 2.0**margin, torch.finfo(torch.float32).max)
        assert got == pytest.approx(scale, rel=1e-6)


def test_rescaled_operands_are_expected_to_be_as_much_larger():
    table = DelayedScaling(history_len=4)
    table.add_all({"a.grad_output": E5M2, "a.input": E4M3})
    for _ in range(2):
        for slot in table.slots.values():
            slot.record(torch.tensor(3.0))
        table.update()
    before = {name: slot.scale.item() for name, slot in table.slots.items()}
    table.rescale("grad_output", 2.0)
    after = {name: slot.scale.item() for name, slot in table.slots.items()}
    assert after == {"a.grad_output": before["a.grad_output"] / 2, "a.input": before["a.input"]}
    assert table.history.amax(0).tolist() == [6.0, 3.0]
    table.update()  # and go on from there
    assert table.slots["a.grad_output"].scale.item() == after["a.grad_output"]


def test_amaxes_of_several_processes_are_reduced_once_a_step():
    table, calls = DelayedScaling(history_len=4), []
    x = added(table, "x", E4M3)

    def reduce_amax(amax):
        calls.append(amax.clone())
        amax.mul_(2)  # the largest is on another process

    table.reduce_amax = reduce_amax
    x.record(torch.tensor(3.0))
    flags = torch.zeros(2)
    assert table.reduce(flags) and len(calls) == 1
    x.record(torch.tensor(100.0))  # by one process alone: of the next step, on all processes alike
    table.update()
    assert len(calls) == 1 and table.history[0, 0] == 6.0
    table.update()
    assert len(calls) == 2 and table.history[1, 0] == 200.0


def test_amaxes_that_were_reduced_are_saved_and_discarded_with_the_others():
    table = DelayedScaling(history_len=4)
    added(table, "x", E4M3).record(torch.tensor(3.0))
    table.reduce_amax = lambda amax: None
    table.reduce(torch.zeros(1))
    assert table.state_dict()["operands"]["x"]["amax"] == 3.0
    table.discard()
    assert table.state_dict()["operands"]["x"]["amax"] == 0.0
    table.update()
    assert table.history[0, 0] == 0.0
