"""Scripts with Lightning's Transformer Engine plugin."""

import pytest

PLUGIN = "from lightning.pytorch.plugins import TransformerEnginePrecision\n"
RECIPE = "from transformer_engine.common.recipe import DelayedScaling, Format\n"
TRAINER = "from lightning.pytorch import Trainer\n"
TORCH = "import torch\n"

# (name, before, after)
TABLE = [
    (
        "weights in BF16",
        f"{TORCH}{PLUGIN}plugin = TransformerEnginePrecision(weights_dtype=torch.bfloat16)\n",
        "from nemo_lowprec import bf16_with_fp8_mixed\n\nplugin = bf16_with_fp8_mixed()\n",
    ),
    (
        "weights in FP16",
        f"{TORCH}{PLUGIN}plugin = TransformerEnginePrecision(weights_dtype=torch.float16, replace_layers=True)\n",
        "from nemo_lowprec import fp16_with_fp8_mixed\n\nplugin = fp16_with_fp8_mixed()\n",
    ),
    (
        "weights in FP32",
        f"{TORCH}{PLUGIN}dtype = torch.float32\nplugin = TransformerEnginePrecision(weights_dtype=dtype)\n"
        "print(torch.__version__)\n",
        f"{TORCH}from nemo_lowprec import te_fp8\n\nplugin = te_fp8()\nprint(torch.__version__)\n",
    ),
    (
        "a recipe's arguments",
        f"{TORCH}{PLUGIN}{RECIPE}HISTORY = 16\n"
        "recipe = DelayedScaling(margin=1, interval=2, fp8_format=Format.E4M3, amax_history_len=HISTORY)\n"
        "plugin = TransformerEnginePrecision(weights_dtype=torch.float32, recipe=recipe)\n",
        "from nemo_lowprec import te_fp8\n\nHISTORY = 16\n"
        'plugin = te_fp8(fp8_margin=1, interval=2, fp8="e4m3", fp8_amax_history_len=HISTORY)\n',
    ),
    (
        "a dict as recipe",
        f"{TORCH}{PLUGIN}"
        'recipe = {"fp8_format": "HYBRID", "amax_compute_algo": "most_recent", "reduce_amax": True}\n'
        "plugin = TransformerEnginePrecision(weights_dtype=torch.bfloat16, recipe=recipe)\nprint(recipe)\n",
        "from nemo_lowprec import bf16_with_fp8_mixed\n\n"
        'recipe = {"fp8_format": "HYBRID", "amax_compute_algo": "most_recent", "reduce_amax": True}\n'
        'plugin = bf16_with_fp8_mixed(fp8="hybrid", fp8_amax_compute_algo="most_recent")\nprint(recipe)\n',
    ),
    (
        "a GEMM in high precision",
        f"{TORCH}{PLUGIN}import transformer_engine.common.recipe as te_recipe\n"
        "plugin = TransformerEnginePrecision(\n"
        "    weights_dtype=torch.bfloat16,\n"
        "    recipe=te_recipe.DelayedScaling(override_linear_precision=(False, False, True)),\n"
        ")\n",
        "from nemo_lowprec import bf16_with_fp8_mixed\n\n"
        "plugin = bf16_with_fp8_mixed(\n    override_linear_precision=(False, False, True),\n)\n",
    ),
    *(
        (
            kind,
            f"{TORCH}{PLUGIN}from transformer_engine.common import recipe\n"
            f"plugin = TransformerEnginePrecision(weights_dtype=torch.bfloat16, recipe=recipe.{kind}())\n",
            f"from nemo_lowprec import {level}\n\nplugin = {level}()\n",
        )
        for kind, level in {
            "Float8CurrentScaling": "bf16_with_fp8_current_scaling_mixed",
            "Float8BlockScaling": "bf16_with_fp8_subchannel_scaling_mixed",
            "MXFP8BlockScaling": "bf16_with_mxfp8_mixed",
            "NVFP4BlockScaling": "bf16_with_nvfp4_mixed",
        }.items()
    ),
    (
        "a Trainer's name of the plugin",
        f'{TRAINER}trainer = Trainer(max_steps=3, precision="transformer-engine", devices=1)  # FP8\n',
        f"{TRAINER}from nemo_lowprec import bf16_with_fp8_mixed\n\n"
        "trainer = Trainer(max_steps=3, plugins=bf16_with_fp8_mixed(), devices=1)  # FP8\n",
    ),
    (
        "a Trainer with other plugins",
        "import lightning as L\nimport mine\n"
        'trainer = L.Trainer(precision="transformer-engine-float16", plugins=[mine.Environment()])\n'
        'other = L.Trainer(plugins=mine.Environment(), precision="transformer-engine-float16")\n',
        "import lightning as L\nimport mine\nfrom nemo_lowprec import fp16_with_fp8_mixed\n\n"
        "trainer = L.Trainer(plugins=[mine.Environment(), fp16_with_fp8_mixed()])\n"
        "other = L.Trainer(plugins=[mine.Environment(), fp16_with_fp8_mixed()])\n",
    ),
    (
        "Fabric",
        'from lightning.fabric import Fabric\nfabric = Fabric(precision="transformer-engine", devices=1)\n',
        "from lightning.fabric import Fabric\nfrom nemo_lowprec import bf16_with_fp8_mixed\n\n"
        "fabric = Fabric(plugins=bf16_with_fp8_mixed(), devices=1)\n",
    ),
    (
        "a level that the script imports already",
        f"{TORCH}{PLUGIN}from nemo_lowprec import te_fp8\n"
        "plugins = te_fp8(), TransformerEnginePrecision(weights_dtype=torch.float32)\n",
        "from nemo_lowprec import te_fp8\n\nplugins = te_fp8(), te_fp8()\n",
    ),
]


@pytest.mark.parametrize(("before", "after"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_a_script_is_migrated(migrated, before, after):
    new, said = migrated(before)
    assert new.replace("\n\n", "\n") == after.replace("\n\n", "\n")
    assert "Not migrated" not in said and "train.py is rewritten." in said


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed", "32-true"])
def test_mixed_precision_without_fp8_is_left_alone(migrated, precision):
    source = f'{TRAINER}trainer = Trainer(precision="{precision}")\n'
    assert migrated(source) == (source, "train.py needs no change.\n")


# (what is on line 4, the sentence begins with)
OBSTACLES = [
    ("Trainer(**settings)", "**settings is known only when the script runs"),
    ("Trainer(precision=args.precision)", "precision=args.precision is known only when the script runs"),
    ("Trainer(precision='transformer-engine', plugins=plugins)", "plugins=plugins is no list or call"),
    ("TransformerEnginePrecision(weights_dtype=torch.bfloat16, recipe=load())", "The recipe load() is made where"),
    ("TransformerEnginePrecision(weights_dtype=args.dtype)", "weights_dtype must be torch.bfloat16"),
    ("TransformerEnginePrecision(weights_dtype=torch.half, recipe={'margin': args.margin})", "args.margin is known"),
    ("TransformerEnginePrecision(weights_dtype=torch.half, recipe={'margin': 99})", "fp8_margin=99 must be"),
    ("TransformerEnginePrecision(weights_dtype=torch.half, recipe={'fp8_dpa': True})", "The recipe's fp8_dpa=True has"),
    ("TransformerEnginePrecision(weights_dtype=torch.half, recipe={'fp8_format': 'E5M2'})", "FP8 format E5M2 has no"),
    ("TransformerEnginePrecision(weights_dtype=torch.half, replace_layers=False)", "replace_layers=False leaves"),
    ("TransformerEnginePrecision(weights_dtype=torch.half, fallback_compute_dtype=torch.float)", "fp16_with_fp8_mixed"),
    ("TransformerEnginePrecision(**settings)", "TransformerEnginePrecision takes **settings"),
    ("isinstance(plugin, TransformerEnginePrecision)", "TransformerEnginePrecision is used without a call."),
    ("settings = dict(precision='transformer-engine')", "'transformer-engine' reaches no Trainer"),
    ("import transformer_engine.pytorch as te", "The script calls Transformer Engine itself"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "sentence"), OBSTACLES)
def test_a_place_that_cannot_be_migrated_is_listed_and_left(migrated, line, sentence):
    source = f"{TORCH}{PLUGIN}{TRAINER}{line}\n"
    new, said = migrated(source)
    assert new == source
    assert f"train.py:4: Not migrated: {sentence}" in said and said.count("\n") == 1


def test_no_level_has_fp32_weights_and_current_scaling(migrated):
    source = (
        f"{TORCH}{PLUGIN}from transformer_engine.common.recipe import Float8CurrentScaling\n"
        "plugin = TransformerEnginePrecision(weights_dtype=torch.float32, recipe=Float8CurrentScaling())\n"
    )
    new, said = migrated(source)
    assert new == source
    assert "No level has FP32 weights and current scaling; there is bf16_with_fp8_current_scaling_mixed" in said


def test_a_variable_that_is_assigned_twice_is_no_known_recipe(migrated):
    source = (
        f"{TORCH}{PLUGIN}recipe = {{}}\nif torch.cuda.is_available():\n    recipe = {{'margin': 1}}\n"
        "plugin = TransformerEnginePrecision(weights_dtype=torch.float32, recipe=recipe)\n"
    )
    new, said = migrated(source)
    assert new == source and "train.py:6: Not migrated: The recipe recipe is made where" in said


def test_places_are_migrated_one_by_one(migrated):
    new, said = migrated(
        f"{TORCH}{PLUGIN}{TRAINER}trainer = Trainer(**settings)\n"
        "plugin = TransformerEnginePrecision(weights_dtype=torch.bfloat16)\n"
    )
    assert "plugin = bf16_with_fp8_mixed()\n" in new and "Trainer(**settings)" in new
    assert "train.py:4: Not migrated" in said and "train.py:5: Lightning's plugin has BF16 weights only" in said


def test_arguments_that_transformer_engine_ignores_are_said(migrated):
    new, said = migrated(
        f"{TORCH}{PLUGIN}plugin = TransformerEnginePrecision(weights_dtype=torch.bfloat16, recipe={{'interval': 4}})\n"
    )
    assert "bf16_with_fp8_mixed(interval=4)" in new
    assert "train.py:3: interval=4 has an effect here. Transformer Engine 2.20 ignores this argument" in said


def test_a_name_of_the_scripts_own_is_not_hidden(migrated):
    source = f"{TORCH}{PLUGIN}te_fp8 = 1\nplugin = TransformerEnginePrecision(weights_dtype=torch.float32)\n"
    new, said = migrated(source)
    assert new == source and "The script has a te_fp8 of its own" in said


def test_the_package_pytorch_lightning_is_named(migrated):
    source = "from pytorch_lightning import Trainer\ntrainer = Trainer(precision='transformer-engine')\n"
    new, said = migrated(source)
    assert new == source and "import it in the place of pytorch_lightning" in said
