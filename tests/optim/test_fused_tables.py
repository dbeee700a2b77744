"""The tables that the fused step keeps from step to step."""

import copy

import pytest
import torch
from low_bit import make_params, randn
from torch import Tensor, nn

from nemo_lowprec.formats import E4M3, FP16
from nemo_lowprec.kernels.multi_tensor import PointerTable
from nemo_lowprec.optim import AdamW, fused
from nemo_lowprec.optim.reference import StepInputs, Update
from nemo_lowprec.tensors import BlockScaledTensor, Fp8Weight, Fp16Weight, GradientTensor


def test_tables_are_made_again_where_an_allocation_has_failed(monkeypatch):
    tables, own, fails = fused._Tables(), torch.zeros, [True]

    def zeros(*args, **kwargs):
        if fails:
            fails.clear()
            raise torch.OutOfMemoryError("no memory")
        return own(*args, **kwargs)

    updates = [
        Update(param, param, param, param, param, None, index) for index, param in enumerate(make_params(torch.float16))
    ]
    monkeypatch.setattr(fused.torch, "zeros", zeros)
    with pytest.raises(torch.OutOfMemoryError):
        tables.fit(updates, False, torch.device("cpu"))
    tables.fit(updates, False, torch.device("cpu"))
    assert tables.index.tolist() == [update.index for update in updates] and tables.salts.numel() == len(updates)


def stored_params():
    """Two matrices of each kind of storage, and two vectors."""
    params = []
    for i in range(2):
        values = randn((4, 256), i)
        master = BlockScaledTensor.from_float(values, FP16)
        in_fp8 = nn.Parameter(Fp8Weight.from_float(master.dequantize(), E4M3, torch.bfloat16, power_of_two=True))
        in_fp8.master_weight = master
        kinds = [Fp16Weight.from_float(values, torch.bfloat16), BlockScaledTensor.from_float(values, FP16)]
        params += [nn.Parameter(one) for one in (*kinds, values.half(), values, randn((130,), i))] + [in_fp8]
    for param in params:
        param.grad_dtype = None
    return params


def set_gradients(optimizer, dtype=None):
    for group in optimizer.param_groups:
        for i, param in enumerate(group["params"]):
            grad = randn(param.shape, 100 + i)
            in_fp8 = dtype is None and param.dim() > 1
            param.grad = GradientTensor.from_float(grad) if in_fp8 else grad.to(dtype or torch.float32)


def launches_of(optimizer, monkeypatch):
    """[(kind, positions, rows of addresses)] of the launches of a step, by position of the first parameter."""
    found = []

    def launch(self, tables, kind, updates, rows, inputs):
        width = len(rows) // len(updates)
        table = [tuple(rows[i : i + width]) for i in range(0, len(rows), width)]
        assert table == [row_of(update) for update in updates]
        found.append((kind, [update.index for update in updates], table))

    monkeypatch.setattr(fused.FusedStep, "_launch", launch)
    for group, updates in optimizer._updates():
        fused.FusedStep().step(updates, StepInputs(group))
    return found


def row_of(update):
    """The columns of ``triton_step.COLUMNS``, from each tensor's present storage."""

    def of(tensor: Tensor | None, *names: str) -> list[int]:
        parts = [getattr(tensor, name, None) for name in names]
        return [weight if part is None else part.data_ptr() for part in parts]

    def elements(tensor: Tensor | None) -> list[int]:
        if isinstance(tensor, BlockScaledTensor):
            return of(tensor, "data_blocks", "exponent")
        return [weight if tensor is None else tensor.data_ptr(), weight]

    stored = next(
        (getattr(update.param, n) for n in ("data_fp16", "data_fp8", "data_blocks") if hasattr(update.param, n)),
        update.param,
    )
    weight = stored.data_ptr()
    scale = of(update.param, "scale_inv" if isinstance(update.param, Fp8Weight) else "exponent")
    grad = [*elements(update.grad), *of(update.grad, "factor")]
    states = [address for t in (update.first, update.second, update.master) for address in elements(t)]
    return (weight, *scale, *grad, *states, update.step.data_ptr())


def test_parameters_that_are_stored_alike_share_a_launch(monkeypatch):
    optimizer = AdamW(stored_params())
    for dtype in (None, torch.float32, torch.bfloat16):
        set_gradients(optimizer, dtype)
        launches = launches_of(optimizer, monkeypatch)
        assert [positions for _, positions, _ in launches] == [[i, i + 6] for i in range(6)]
        assert len({kind for kind, _, _ in launches}) == 6


def test_addresses_are_those_of_the_storage_that_tensors_have_now(monkeypatch):
    optimizer = AdamW(stored_params())
    params = optimizer.param_groups[0]["params"]
    set_gradients(optimizer)
    before = launches_of(optimizer, monkeypatch)
    assert launches_of(optimizer, monkeypatch) == before

    def changed():
        after = launches_of(optimizer, monkeypatch)
        return {
            row[0]
            for (_, _, old), (_, _, new) in zip(before, after, strict=True)
            for row, now in zip(old, new, strict=True)
            if row != now
        }

    keep = copy.copy(optimizer.state[params[0]])  # held, so that new tensors have other addresses
    optimizer.state[params[0]]["exp_avg"] = keep["exp_avg"].clone()
    assert len(changed()) == 1
    old = params[3].data
    params[3].data = old.clone()
    assert len(changed()) == 2
    state = optimizer.state_dict()
    held = list(optimizer.state.values())
    optimizer.load_state_dict(state)
    assert len(changed()) == len(params) == len(held)


def test_a_parameter_without_a_gradient_is_in_no_launch(monkeypatch):
    optimizer = AdamW(stored_params())
    params = optimizer.param_groups[0]["params"]
    set_gradients(optimizer)
    before = launches_of(optimizer, monkeypatch)
    params[6].grad = None
    assert [positions for _, positions, _ in launches_of(optimizer, monkeypatch)] == [
        [0],
        *([i, i + 6] for i in range(1, 6)),
    ]
    params[6].grad = GradientTensor.from_float(randn((4, 256), 7))
    assert [found[:2] for found in launches_of(optimizer, monkeypatch)] == [found[:2] for found in before]


def test_gradients_of_another_order_are_copied(monkeypatch):
    optimizer = AdamW([nn.Parameter(randn((8, 4), 0))])
    param = optimizer.param_groups[0]["params"][0]
    param.grad = randn((4, 8), 1).t()
    ((_, _, ((_, _, address, *_),)),) = launches_of(optimizer, monkeypatch)
    assert address != param.grad.data_ptr()


def test_a_table_is_uploaded_where_an_address_has_changed(monkeypatch):
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    pointers, cpu = PointerTable(), torch.device("cpu")
    table = pointers.upload([16, 8, 32, 4], 2, cpu, [16, 32])
    assert table.tolist() == [[16, 8], [32, 4]] and pointers.aligned
    assert pointers.upload([16, 8, 32, 4], 2, cpu, iter(())) is table
    assert pointers.upload([24, 8, 32, 4], 2, cpu, [24, 32]).tolist() == [[24, 8], [32, 4]] and not pointers.aligned
