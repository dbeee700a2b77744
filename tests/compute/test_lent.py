"""What a graph writes is handed out without a copy, and keeps its values where somebody holds it."""

import torch

from nemo_lowprec.compute.graphs.lent import Lent, Loans


class Counter:
    """Writes 1, 2, 3, ... into a tensor, as a graph does."""

    def __init__(self):
        self.memory = torch.zeros(4, 2)
        self.lent = Lent([self.memory])
        self.count = 0

    def _replay(self):
        self.count += 1
        self.memory.fill_(self.count)

    def run(self):
        (found,) = self.lent.written_by(self._replay)
        return found


def test_a_result_that_nobody_holds_is_lent():
    graph = Counter()
    for count in (1, 2, 3):
        out = graph.run()
        assert out.data_ptr() == graph.memory.data_ptr() and out.eq(count).all()
        del out


def test_results_that_somebody_holds_keep_their_values():
    graph = Counter()
    kept = [graph.run() for _ in range(3)]
    assert [out[0, 0].item() for out in kept] == [1, 2, 3]
    assert len({out.data_ptr() for out in kept}) == 3
    view = kept[0].view(-1)[1:]
    del kept
    assert graph.run().eq(4).all() and view.eq(1).all()
    del view
    assert graph.run().data_ptr() == graph.memory.data_ptr()


def test_a_result_may_be_written_to_and_has_versions_of_its_own():
    graph = Counter()
    out = graph.run()
    with torch.enable_grad():
        out.requires_grad_()
        square = out * out
    del out
    again = graph.run()
    again.add_(1.0)
    (grad,) = torch.autograd.grad(square.sum(), square)
    assert again.eq(3).all() and square.eq(1).all() and grad.eq(1).all()


def test_memory_that_the_graph_keeps_is_never_lent():
    memory = torch.ones(3, requires_grad=True)
    result = memory.exp()  # saved for backward
    alone = Lent([result, None])
    first, nothing = alone.written_by(lambda: None)
    assert nothing is None and first.data_ptr() != result.data_ptr()
    assert not first.requires_grad


def test_memory_that_is_there_twice_or_that_the_caller_writes_is_never_lent():
    twice, passed_on, own = (torch.zeros(2) for _ in range(3))
    results = Lent([twice, twice, passed_on, own], [passed_on]).written_by(lambda: None)
    assert len({t.data_ptr() for t in (*results, twice, passed_on)}) == 6
    assert results[3].data_ptr() == own.data_ptr()


def test_what_a_later_graph_has_lent_outlives_an_earlier_one():
    """The later graph's result lies where the earlier one has temporary tensors, as the allocator of graphs does."""
    shared, own = torch.zeros(4), torch.zeros(4)
    loans, results = Loans(), {1: Lent([own]), 2: Lent([shared])}

    def earlier():
        shared.fill_(float("nan"))
        own.fill_(1.0)

    (late,) = loans.written_by(2, results[2], lambda: shared.fill_(2.0))
    (early,) = loans.written_by(1, results[1], earlier)
    assert late.eq(2).all() and early.eq(1).all()
    assert late.data_ptr() == shared.data_ptr()
    del late
    (early,) = loans.written_by(1, results[1], earlier)
    assert shared.isnan().all()  # nobody holds it: nothing is copied


def test_a_later_graph_copies_nothing_for_earlier_ones():
    first, second = torch.zeros(4), torch.zeros(4)
    loans, results = Loans(), {1: Lent([first]), 2: Lent([second])}
    (early,) = loans.written_by(1, results[1], lambda: first.fill_(1.0))

    def later():
        second.fill_(2.0)
        first.fill_(3.0)  # no graph does so: what is lent stays taken while later ones are captured

    loans.written_by(2, results[2], later)
    assert early.eq(3).all()
