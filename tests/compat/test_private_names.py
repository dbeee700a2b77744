"""Private names of other packages stand in ``compat`` alone, and each has a test in this folder."""

import ast
import importlib
from pathlib import Path

import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy

import nemo_lowprec

ROOT = Path(nemo_lowprec.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
COMPAT = ROOT / "compat"

# torch documents these operators for those who write tensor subclasses and optimizers; their schemas are checked below.
OPERATORS = {
    "_amp_foreach_non_finite_check_and_unscale_",
    "_foreach_copy_",
    "_foreach_div_",
    "_foreach_mul_",
    "_foreach_norm",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_flash_attention",
    "_scaled_mm",
    "_to_copy",
    "_unsafe_view",
}
# Every subclass of nn.Module and of Tensor relies on these.
PROTOCOL = {"_modules", "_parameters", "_buffers", "_version", "_schema"}
# Set by ModelParallelStrategy for its subclasses.
OF_STRATEGY = "_save_distributed_checkpoint"
# What a class of ours calls or replaces of its base class.
OVERRIDDEN = {
    "_after_closure": "lightning.pytorch.plugins:Precision",
    "_get_fp8_params_and_shard_fp32_from_fp8": "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer",
    "_get_model_param_range_map": "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer",
    "_load_from_checkpoint": "transformers:Trainer",
    "_wrap_closure": "lightning.pytorch.plugins:Precision",
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def names_of_ours() -> set[str]:
    """Names that some file of the package defines: functions, classes, variables, attributes of ``self``."""
    ours = set()
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                ours.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                ours.add(node.id)
            elif (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and ast.unparse(node.value) == "self"
            ):
                ours.add(node.attr)
    return ours


def foreign(path: Path, ours: set[str]) -> set[str]:
    """Private names of other packages that a file reads or imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            names.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.module.startswith("nemo_lowprec"):
            parts = [*node.module.split("."), *(alias.name for alias in node.names)]
            names |= {part for part in parts if is_private(part)}
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr", "setattr"):
            names |= {a.value for a in node.args[1:2] if isinstance(a, ast.Constant) and is_private(str(a.value))}
    return {name for name in names - ours if not name.startswith("_lowprec")}


OURS = names_of_ours()


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_private_names_of_other_packages_stand_in_compat_alone(path):
    if COMPAT not in path.parents:
        assert foreign(path, OURS) - OPERATORS - PROTOCOL - {OF_STRATEGY} - set(OVERRIDDEN) == set()


def test_the_search_finds_attributes_imports_and_names_in_getattr():
    found = foreign(COMPAT / "distributed.py", OURS) | foreign(COMPAT / "checkpoint.py", OURS)
    assert found > {"_fsdp_param_group", "_StorageInfo", "_is_replica"}


@pytest.mark.parametrize("name", sorted(OPERATORS))
def test_operators_are_there(name):
    assert hasattr(torch, name) or hasattr(torch.ops.aten, name)


@pytest.mark.parametrize("method", sorted(OVERRIDDEN))
def test_methods_that_are_replaced_are_there(method):
    module, name = OVERRIDDEN[method].split(":")
    if module.startswith("megatron"):
        pytest.importorskip("megatron.core")
    assert callable(getattr(getattr(importlib.import_module(module), name), method))


def test_a_strategy_keeps_how_it_saves():
    assert getattr(ModelParallelStrategy(save_distributed_checkpoint=False), OF_STRATEGY) is False


def public_names(path: Path) -> set[str]:
    """Names that a file of ``compat`` offers to the others."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                names |= {n.id for n in ast.walk(target) if isinstance(n, ast.Name)}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.module.startswith("__"):
            names |= {alias.asname for alias in node.names if alias.asname}
    return {name for name in names if not name.startswith("_")}


def names_in(path: Path) -> set[str]:
    return {getattr(node, "attr", getattr(node, "id", "")) for node in ast.walk(ast.parse(path.read_text()))}


TESTED = set().union(*(names_in(path) for path in Path(__file__).parent.glob("test_*.py")))


@pytest.mark.parametrize("path", sorted(set(COMPAT.glob("*.py")) - {COMPAT / "__init__.py"}), ids=lambda p: p.stem)
def test_each_name_has_a_test(path):
    assert public_names(path) - TESTED == set()
