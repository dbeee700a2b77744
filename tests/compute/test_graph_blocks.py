"""Which modules are captured as blocks, and what a captured block watches on the host. The rest is in tests/gpu."""

import random
from dataclasses import replace

import lightning.pytorch as pl
import numpy
import pytest
import torch
from torch import nn

from nemo_lowprec import CHART, msamp_o2, prepare
from nemo_lowprec.chart.groups import LayerFilter
from nemo_lowprec.chart.recipe import Recipe
from nemo_lowprec.compute import ReferenceBackend, convert_layers
from nemo_lowprec.compute.graphs.blocks import find_blocks, find_wholes
from nemo_lowprec.compute.graphs.gradients import WrittenGradients
from nemo_lowprec.compute.graphs.guard import Guard, HostState, obstacle
from nemo_lowprec.compute.graphs.inputs import Unfit, flatten, key_of
from nemo_lowprec.compute.graphs.layers import Layers
from nemo_lowprec.compute.graphs.twins import grad_buffers, twin_of
from nemo_lowprec.compute.operands import new_histories
from nemo_lowprec.compute.producers import Reader, name_reader
from nemo_lowprec.engine import Engine
from nemo_lowprec.plugins.summary import graphs_row, level_table


class Block(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)
        self.factor, self.table = 1.0, torch.ones(3)
        self.calls, self.seen = 0, []

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)))


class Stage(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.reduce = nn.Linear(16, 16)


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (nn.ModuleDict({"layers": nn.ModuleList([Block(), Block(), Block()])}), ["layers.0", "layers.1", "layers.2"]),
        (nn.Sequential(Block(), Block()), ["0", "1"]),
        (nn.Sequential(nn.Linear(16, 16), Block(), Block()), ["1", "2"]),
        (nn.ModuleDict({"stages": nn.Sequential(Stage(), Stage())}), ["stages.0", "stages.1"]),  # the outermost
        (nn.ModuleDict({"stem": nn.Sequential(nn.Linear(16, 16), nn.ReLU()), "one": nn.ModuleList([Block()])}), []),
        (nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), []),  # a layer is no block
        (nn.ModuleList([nn.LayerNorm(16), nn.LayerNorm(16)]), []),
        (nn.ModuleDict({"a": nn.ModuleList([Block(), Block()]), "b": nn.ModuleList([Block(), Block()])}),
         ["a.0", "a.1", "b.0", "b.1"]),
    ],
)  # fmt: skip
def test_blocks(model, names):
    found = find_blocks(model)
    assert list(found) == names
    assert all(model.get_submodule(name) is block for name, block in found.items())


def test_blocks_of_transformers():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    with torch.device("meta"):
        llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, **sizes))
        bert = transformers.BertModel(transformers.BertConfig(vocab_size=64, **sizes))
    assert list(find_blocks(llama)) == ["model.layers.0", "model.layers.1"]
    assert list(find_blocks(bert)) == ["encoder.layer.0", "encoder.layer.1"]
    assert list(find_wholes(llama, find_blocks(llama))) == ["", "model"]
    assert list(find_wholes(bert, find_blocks(bert))) == ["", "encoder"]


class Called(nn.Module):
    """Two lists of blocks, one of which nobody calls as a module."""

    def __init__(self):
        super().__init__()
        self.listed, self.chain = nn.ModuleList([Block(), Block()]), nn.Sequential(Block(), Block())
        self.other = nn.Sequential(nn.Linear(16, 16))

    def forward(self, x):
        return self.chain(x)


def test_modules_around_the_blocks():
    class Training(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Called()

        def forward(self, x):
            return self.model(x)

    model = nn.ModuleDict({"inner": Called()})
    assert list(find_wholes(model, find_blocks(model))) == ["inner", "inner.chain"]
    model = Training()
    assert list(find_wholes(model, find_blocks(model))) == ["model", "model.chain"]
    assert not find_wholes(nn.Linear(16, 16), [])


def changes(block):
    return {
        "an attribute": lambda: setattr(block, "factor", 2.0),
        "a new attribute": lambda: setattr(block, "other", 1),
        "a deleted attribute": lambda: delattr(block, "factor"),
        "a tensor attribute": lambda: setattr(block, "table", torch.ones(3)),
        "evaluation of a layer": lambda: block.norm.eval(),
        "a module": lambda: setattr(block, "up", nn.Linear(16, 16)),
        "a parameter": lambda: setattr(block.up, "weight", nn.Parameter(torch.ones(16, 16))),
        "a hook": lambda: block.up.register_forward_hook(lambda *_: None),
        "a hook of all modules": lambda: nn.modules.module.register_module_forward_hook(lambda *_: None),
    }


@pytest.mark.parametrize("what", list(changes(Block())))
def test_a_guard_sees_every_change(what):
    block = Block()
    guard = Guard(block)
    assert guard.holds()
    with torch.no_grad():
        block.up.weight.mul_(2.0)  # a graph reads the memory
    assert guard.holds()
    handle = changes(block)[what]()
    try:
        assert not guard.holds()
    finally:
        if hasattr(handle, "remove"):
            handle.remove()


def test_what_cannot_be_captured():
    block = Block()
    assert obstacle(block) is None
    block.register_forward_hook(lambda *_: None)  # is called outside of the block's forward
    assert obstacle(block) is None
    handle = block.down.register_full_backward_hook(lambda *_: None)
    assert obstacle(block) == "down has a hook"
    handle.remove()
    handle = block.down.weight.register_hook(lambda grad: grad * 2)
    assert obstacle(block) == "down.weight has a gradient hook"
    handle.remove()
    assert obstacle(nn.Sequential(nn.SyncBatchNorm(4))) == "0 is a SyncBatchNorm"


def test_blocks_of_which_torch_makes_cuda_graphs_are_in_no_other_graph():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].compile()
    assert obstacle(model) is None
    model[1].compile(mode="reduce-overhead")
    assert obstacle(model) == "torch.compile makes CUDA graphs of 1"
    wrapped = torch.compile(nn.Linear(4, 4), options={"triton.cudagraphs": True})
    assert obstacle(nn.Sequential(wrapped)) == "torch.compile makes CUDA graphs of 0"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda block: None, None),
        (lambda block: torch.rand(1), "it draws random numbers on the host"),
        (lambda block: random.random(), "it draws random numbers on the host"),
        (lambda block: numpy.random.rand(), "it draws random numbers on the host"),
        (lambda block: setattr(block, "calls", 1), "it changes calls in its forward pass"),
        (lambda block: setattr(block.norm, "eps", 1e-3), "it changes norm.eps in its forward pass"),
        (lambda block: block.seen.append(1), "it changes len(seen) in its forward pass"),
    ],
)
def test_what_a_pass_changes_on_the_host(change, reason):
    block = Block()
    before = HostState(block)
    block(torch.ones(2, 16))
    change(block)
    assert before.changed(block) == reason


def test_arguments_that_no_graph_takes():
    leaves, structure = flatten(((1, None, "a"), {"flag": True, "pair": (2.0, torch.float32)}))
    assert key_of(leaves, structure) == key_of(*flatten(((1, None, "a"), {"flag": True, "pair": (2.0, torch.float32)})))
    assert key_of(leaves, structure) != key_of(*flatten(((1, None, "a"), {"flag": 1, "pair": (2.0, torch.float32)})))
    with pytest.raises(Unfit, match="an argument is a object"):
        key_of(*flatten(((object(),), {})))
    with pytest.raises(Unfit, match="an argument is a Tensor on cpu"):
        key_of(*flatten(((torch.ones(1),), {})))


def test_graphs_need_a_gpu():
    model = nn.Sequential(Block(), Block())
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match="graphs=True: there are no CUDA graphs on a CPU"):
        prepare(model, optimizer, "msamp_o2", graphs=True)
    assert "forward" not in prepare(model, optimizer, "msamp_o2")[0][0].__dict__


@pytest.mark.parametrize("value", ["on", 1, None])
def test_a_bad_value(value):
    with pytest.raises(ValueError, match=f"graphs={value!r} must be 'auto', True or False"):
        msamp_o2(graphs=value)


def test_a_cache_of_keys_and_values_says_how_to_leave_it_out():
    from transformers import DynamicCache

    leaves, structure = flatten((DynamicCache(),))
    with pytest.raises(Unfit, match=r"an argument is a DynamicCache, which config\.use_cache=False leaves out"):
        key_of(leaves, structure)


@pytest.mark.parametrize(
    ("graphs", "gathered", "processes", "activations", "said"),
    [
        ("auto", None, 1, None, "of the model or its blocks, after a few passes"),
        (True, None, 2, "fp8", "of the model or its blocks, after a few passes"),
        ("auto", None, 2, None, "off, as there are several processes; graphs=True turns them on"),
        (False, None, 1, None, "off, as graphs=False"),
        ("auto", torch.bfloat16, 1, None, "off, as FSDP2 gathers the weights anew for each pass"),
        ("auto", None, 1, "fp8", "of the model or its blocks, after a few passes"),
    ],
)
def test_the_table_says_whether_there_are_graphs(graphs, gathered, processes, activations, said, monkeypatch):
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU())
    model, _ = prepare(model, None, "msamp_o2", activations=activations)
    computation = Engine.of(model).columns.computation
    assert graphs_row(computation) is None  # on a CPU
    computation.device, computation._gathered_as = torch.device("cuda"), gathered
    computation.options = replace(computation.options, graphs=graphs)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: processes)
    assert graphs_row(computation) == said
    assert f"CUDA graphs          {said}"[:60] in level_table(CHART["msamp_o2"], False, [model], said)


class Producer(nn.Module):
    """Tells its reader's name, as modules that quantize their result do."""

    def __init__(self):
        super().__init__()
        self.reader = Reader()

    def forward(self, x):
        y = x + 1
        name_reader(y, self.reader)
        return y


def test_a_capture_forgets_readers_outside_of_the_block():
    model = nn.ModuleDict({"first": Producer(), "up": nn.Linear(16, 16)})
    recipe = Recipe("delayed")
    convert_layers(model, torch.bfloat16, recipe, ReferenceBackend(), None, LayerFilter(), new_histories(recipe))
    plan, reader = model.up.gemm_plan, model.first.reader
    x = torch.randn(16, 16).bfloat16()
    for plans, knows in (([plan], True), ([], False)):
        model.up(model.first(x))
        assert reader.backend is plan.backend
        with Layers(plans, [reader]).capturing(model):
            assert (reader.backend is not None) is knows


def test_gradients_of_layers_that_compute_as_one_lie_below_each_other():
    params = [nn.Parameter(torch.randn(4, 8)) for _ in range(3)]
    first, second, alone = grad_buffers([twin_of(param) for param in params], params, [params[:2]])
    assert [grad.shape for grad in (first, second, alone)] == [(4, 8)] * 3
    assert second.data_ptr() == first.data_ptr() + first.nbytes
    assert first.untyped_storage().nbytes() == 2 * first.nbytes and alone.untyped_storage().nbytes() == alone.nbytes


@pytest.mark.parametrize("first", [True, False])
def test_each_gradient_has_memory_of_its_own(first):
    """And the dtype in which it was computed: no buffer rounds what torch's operations have summed in FP32."""
    given = torch.ones(4, 6)
    buffers = [torch.empty(4, 6, dtype=torch.bfloat16) for _ in range(6)]
    whole, both = torch.ones(2, 4, 6), torch.ones(4, 6)
    grads = [buffers[0], torch.ones(4, 6), given, whole[1], both, both, torch.ones(6, 4).t(), None]
    computed = WrittenGradients(grads, [*buffers, buffers[0], None], [given.data_ptr()], first)
    found = computed.outside()
    computed.move()
    assert found[0] is buffers[0] and (found[1] is grads[1]) == first and found[7] is None
    addresses = [grad.data_ptr() for grad in found[:7]]
    assert len(set(addresses)) == 7 and not {given.data_ptr(), whole[1].data_ptr(), both.data_ptr()} & set(addresses)
    for want, have in zip(grads[1:7], found[1:7], strict=True):
        assert have.dtype == torch.float32 and torch.equal(want, have) and have.stride() == (6, 1)


def test_only_the_first_graph_of_a_memory_leaves_gradients_there():
    """Graphs that were captured earlier run later, and have temporary tensors in that memory."""
    buffers = [torch.empty(4, 6) for _ in range(2)]
    computed = WrittenGradients([torch.ones(4, 6), buffers[1]], buffers, [], first=False)
    assert [grad is buffer for grad, buffer in zip(computed.outside(), buffers, strict=True)] == [True, True]
    assert torch.equal(buffers[0], torch.ones(4, 6))
