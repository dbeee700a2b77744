"""Scripts with Accelerate's FP8 recipes."""

import ast

import pytest

HEAD = "import torch\nfrom accelerate import Accelerator\nfrom accelerate.utils import {}\n"
BODY = "model = build()\noptimizer = torch.optim.AdamW(model.parameters())\n"
PREPARE = "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)\n"
NEW = (
    "import torch\nfrom accelerate import Accelerator\nimport nemo_lowprec.accelerate\n\n"
    'accelerator = Accelerator(mixed_precision="bf16")\n' + BODY
)
CALL = "model, optimizer, loader = nemo_lowprec.accelerate.prepare(accelerator, model, optimizer, loader, level={})\n"

# (recipe, level and options)
RECIPES = [
    ('MSAMPRecipeKwargs(opt_level="O2")', '"msamp_o2"'),
    ('MSAMPRecipeKwargs(opt_level="O1")', '"msamp_o1"'),
    ('FP8RecipeKwargs(backend="msamp", opt_level="O3")', '"msamp_o3"'),
    ('TERecipeKwargs(amax_compute_algo="max")', '"te_fp8", fp8_amax_compute_algo="max"'),
    ("TERecipeKwargs()", '"te_fp8"'),
    ('TERecipeKwargs(amax_compute_algo="most_recent")', '"te_fp8", fp8_amax_compute_algo="most_recent"'),
    ("AORecipeKwargs()", '"bf16_with_fp8_current_scaling_mixed"'),
]


@pytest.mark.parametrize(("recipe", "level"), RECIPES)
def test_a_recipe_becomes_a_level(migrated, recipe, level):
    before = (
        HEAD.format(recipe.partition("(")[0])
        + f'accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[{recipe}])\n{BODY}{PREPARE}'
    )
    new, said = migrated(before)
    assert ast.dump(ast.parse(new)) == ast.dump(ast.parse(NEW + CALL.format(level)))
    assert "Not migrated" not in said


def test_arguments_of_a_recipe_in_a_variable_are_the_levels(migrated):
    new, said = migrated(
        HEAD.format("FP8RecipeKwargs, GradScalerKwargs")
        + "# FP8\nHISTORY = 32\n"
        + 'recipe = FP8RecipeKwargs(backend="TE", margin=1, fp8_format="E4M3", amax_history_len=HISTORY)\n'
        + "handlers = [GradScalerKwargs(), recipe]\n"
        + "accelerator = Accelerator(kwargs_handlers=handlers, mixed_precision='fp8')\n"
        + BODY
        + PREPARE
    )
    assert "handlers = [GradScalerKwargs()]\n" in new and "import GradScalerKwargs\n" in new
    assert "# FP8\nHISTORY = 32\n" in new and "recipe" not in new
    assert 'accelerator = Accelerator(kwargs_handlers=handlers, mixed_precision="bf16")\n' in new
    options = 'level="te_fp8",\n    fp8="e4m3",\n    fp8_margin=1,\n    fp8_amax_history_len=HISTORY,\n'
    assert options + ")\n" in new
    assert "Evaluation computes in FP8, too" in said and "has an effect here" not in said


@pytest.mark.parametrize("given", ["interval=4", "override_linear_precision=(False, False, True)",
                                   'amax_compute_algo="most_recent"'])  # fmt: skip
def test_what_acts_here_alone_is_said(migrated, given):
    made = f'accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[TERecipeKwargs({given})])\n'
    _, said = migrated(HEAD.format("TERecipeKwargs") + made + BODY + PREPARE)
    assert f"{given.replace(chr(34), chr(39))} has an effect here." in said


def test_a_question_after_the_precision_gets_a_note(migrated):
    new, said = migrated(
        HEAD.format("MSAMPRecipeKwargs")
        + 'accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[MSAMPRecipeKwargs()])\n'
        + f'{BODY}{PREPARE}if accelerator.mixed_precision == "fp8" and other.mixed_precision:\n    pass\n'
    )
    assert new.endswith('if accelerator.mixed_precision == "fp8" and other.mixed_precision:\n    pass\n')
    assert said.count("mixed_precision is") == 1
    assert "8: accelerator.mixed_precision is 'bf16' now." in said


def test_model_and_optimizer_come_first(migrated):
    new, _ = migrated(
        HEAD.format("MSAMPRecipeKwargs")
        + 'accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[MSAMPRecipeKwargs()])\n'
        + "net = build()\nadam = torch.optim.AdamW(net.parameters())\n"
        + "train_dl, adam, net = accelerator.prepare(\n    train_dl, adam, net\n)\n"
        + "eval_dl = accelerator.prepare(eval_dl)\n"
    )
    assert (
        "net, adam, train_dl = nemo_lowprec.accelerate.prepare(\n"
        '    accelerator, net, adam, train_dl, level="msamp_o2"\n)\n'
        "eval_dl = accelerator.prepare(eval_dl)\n"
    ) in new


# (the Accelerator, the call of prepare, the sentence begins with)
FP8 = 'Accelerator(mixed_precision="fp8", kwargs_handlers=[TERecipeKwargs({})])'
TE = FP8.format("")
PLAIN = "model, optimizer = accelerator.prepare(model, optimizer)"
OBSTACLES = [
    ('Accelerator(mixed_precision="fp8")', PLAIN, "4: Not migrated: The backend that trains in FP8 is"),
    ("Accelerator(mixed_precision=args.precision)", PLAIN, "4: Not migrated: mixed_precision=args.precision is known"),
    ("Accelerator(**settings)", PLAIN, "4: Not migrated: **settings is known only"),
    ('Accelerator(mixed_precision="fp8", kwargs_handlers=handlers)', PLAIN, "4: Not migrated: kwargs_handlers=handler"),
    (FP8.format("margin=args.margin"), PLAIN, "4: Not migrated: args.margin is known only"),
    (FP8.format("margin=99"), PLAIN, "4: Not migrated: fp8_margin=99 must be"),
    (FP8.format('fp8_format="E5M2"'), PLAIN, "4: Not migrated: fp8_format='E5M2' must be"),
    (FP8.format("use_mxfp8_block_scaling=True"), PLAIN, "4: Not migrated: use_mxfp8_block_scaling=True has no level"),
    (FP8.format("").replace("TERecipeKwargs", "FP8RecipeKwargs"), PLAIN, "4: Not migrated: The backend of FP8RecipeKw"),
    (TE.replace("(m", "(fsdp_plugin=plugin, m"), PLAIN, "4: Not migrated: A level does not train under Accelerate's f"),
    (TE, "model = accelerator.prepare(model)", "7: Not migrated: The names in accelerator.prepare(model) do not tell"),
    (TE, "objects = accelerator.prepare(*objects)", "7: Not migrated: accelerator.prepare(*objects) is called with *o"),
    (TE, "a = accelerator.prepare(optimizer, model)", "7: Not migrated: accelerator.prepare(optimizer, model) must ta"),
    (TE, "model = accelerator.prepare_model(model)", "7: Not migrated: accelerator.prepare_model prepares one object"),
    (TE, "train(accelerator)", "4: Not migrated: accelerator.prepare is called with a model at no place"),
]  # fmt: skip


@pytest.mark.parametrize(("accelerator", "prepare", "sentence"), OBSTACLES)
def test_an_accelerator_is_migrated_whole_or_not(migrated, accelerator, prepare, sentence):
    source = HEAD.format("FP8RecipeKwargs, TERecipeKwargs") + f"accelerator = {accelerator}\n{BODY}{prepare}\n"
    new, said = migrated(source)
    assert new == source
    assert f"train.py:{sentence}" in said and said.count("\n") == 1


def test_a_recipe_that_reaches_no_accelerator_is_listed(migrated):
    source = HEAD.format("TERecipeKwargs") + "recipe = TERecipeKwargs()\nrun(recipe)\n"
    new, said = migrated(source)
    assert new == source and "train.py:4: Not migrated: This TERecipeKwargs reaches no Accelerator" in said


def test_an_accelerator_without_fp8_is_left_alone(migrated):
    source = "from accelerate import Accelerator\naccelerator = Accelerator(mixed_precision='bf16')\n"
    assert migrated(source) == (source, "train.py needs no change.\n")
