"""The tables that the fused step keeps from step to step."""

import pytest
import torch
from low_bit import make_params

from nemo_lowprec.optim import fused
from nemo_lowprec.optim.reference import Update


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
