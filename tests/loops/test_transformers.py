"""transformers' Trainer at the levels of the chart."""

import copy

import accelerate
import pytest
import torch
from transformers import AutoModelForCausalLM, EarlyStoppingCallback, TrainerCallback, TrainingArguments

from nemo_lowprec.engine import Engine
from nemo_lowprec.optim import LowBitStates
from nemo_lowprec.transformers import LowPrecisionTrainer
from tests.faces import FACE_LEVELS, TASKS, batches, make_model, make_optimizer, trainer_losses
from tests.processes import on_processes
from tests.support import assert_same, clone


@pytest.fixture(autouse=True)
def ended():
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


class Recording(LowPrecisionTrainer):
    """Keeps the loss of each micro-batch."""

    def __init__(self, *args, **options):
        self.losses, self.bad = [], ()
        super().__init__(*args, **options)

    def compute_loss(self, model, *args, **options):
        loss = super().compute_loss(model, *args, **options)
        if model.training:
            loss = loss * float("inf") if len(self.losses) in self.bad else loss
            self.losses.append(loss.item())
        return loss


def samples(task, steps=12):
    return [{name: value[i] for name, value in batch.items()} for batch in batches(task, steps) for i in range(16)]


def trainer(folder, level, task="llama", optimizer=None, level_options=None, eval_data=None, callbacks=None, **options):
    settings = {
        "per_device_train_batch_size": 16, "max_steps": 6, "use_cpu": True, "report_to": [], "disable_tqdm": True,
        "lr_scheduler_type": "constant", "train_sampling_strategy": "sequential", "save_strategy": "no",
        "max_grad_norm": 0.0, "learning_rate": 2e-3,
    }  # fmt: skip
    model = make_model(task)
    made = Recording(
        model, TrainingArguments(str(folder), **(settings | options)), train_dataset=samples(task), level=level,
        optimizers=(optimizer and optimizer(model), None), level_options=level_options, eval_dataset=eval_data,
        callbacks=callbacks,
    )  # fmt: skip
    made.model_accepts_loss_kwargs = False  # else the loss is a sum over the number of tokens
    return made


@pytest.mark.parametrize("level", FACE_LEVELS)
@pytest.mark.parametrize(("task", "bf16"), zip(TASKS, (True, False), strict=True))
def test_the_losses_are_the_trainers(task, bf16, level, tmp_path):
    mine = trainer(tmp_path, level, task, make_optimizer, max_steps=12, bf16=bf16)
    mine.train()
    assert mine.losses == trainer_losses(task, level)


RESUMED = [
    ("bf16_with_fp8_mixed", {"fp8_params": True}, {"optim": "adamw_torch_fused"}),
    ("msamp_o2", {"stochastic_rounding": True}, {"optim": "adamw_torch", "gradient_accumulation_steps": 2}),
    ("msamp_o3", {"half": "fp16"}, {"fp16": True}),
]


@pytest.mark.parametrize(("level", "level_options", "options"), RESUMED)
def test_a_resumed_run_goes_on_bit_for_bit(level, level_options, options, tmp_path):
    options = {
        "max_steps": 4, "save_strategy": "steps", "save_steps": 2, "max_grad_norm": 1.0, "lr_scheduler_type": "linear",
        "eval_strategy": "steps", "eval_steps": 2, "eval_data": samples("llama", 1), "level_options": level_options,
        **options,
    }  # fmt: skip
    first = trainer(tmp_path, level, **options)
    first.train()
    again = trainer(tmp_path, level, **options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert len(again.losses) * 2 == len(first.losses)
    assert again.losses == first.losses[len(again.losses) :]
    assert_same(clone(dict(again.model.state_dict())), clone(dict(first.model.state_dict())))
    seen = [[e["eval_loss"] for e in t.state.log_history if "eval_loss" in e] for t in (first, again)]
    assert seen[0] == seen[1] and seen[0][-1] < seen[0][0]
    third = again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))  # into the converted model
    assert third.global_step == 4 and again.losses[-2:] == first.losses[-2:]


@pytest.mark.parametrize("level", ["te_fp8", "bf16_mixed", "msamp_o3"])
def test_a_model_in_bf16_resumes_from_its_master_weights(level, tmp_path):
    losses = []
    for checkpoint in (None, str(tmp_path / "checkpoint-2")):
        mine = trainer(tmp_path, level, bf16=True, max_steps=4, save_strategy="steps", save_steps=2)
        mine.model.to(torch.bfloat16)  # as from_pretrained gives it
        mine.train(resume_from_checkpoint=checkpoint)
        losses.append(mine.losses)
    assert losses[1] == losses[0][2:]


@pytest.mark.parametrize(("level_options", "options"), [({}, {}), ({"half": "fp16"}, {"fp16": True})])
def test_an_optimizer_that_is_made_anew_resumes_too(level_options, options, tmp_path):
    mine = trainer(
        tmp_path, "msamp_o2", level_options=level_options, max_steps=4, save_strategy="steps", save_steps=2, **options
    )
    mine.train()
    mine.optimizer = mine.lr_scheduler = None
    mine.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert mine.losses[-2:] == mine.losses[2:4]


@pytest.mark.parametrize("level", FACE_LEVELS)
def test_the_saved_model_opens_plain_with_its_master_weights(level, tmp_path):
    mine = trainer(tmp_path, level, bf16=True)
    mine.train()
    mine.save_model()
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    want = mine.model.state_dict()
    assert plain.dtype == torch.float32 and want.keys() == plain.state_dict().keys()
    assert all(torch.equal(value, want[name].float()) for name, value in plain.state_dict().items())
    assert mine.evaluate(samples("llama", 1))["eval_loss"] == pytest.approx(
        plain(**batches("llama", 1)[0]).loss.item(), rel=0.02
    )


def test_the_best_model_is_loaded_into_weights_and_masters(tmp_path):
    kept = {}

    class Keep(TrainerCallback):
        def on_evaluate(self, args, state, control, model=None, **_):
            kept[state.global_step] = clone(dict(model.state_dict()))

    mine = trainer(
        tmp_path, "bf16_with_fp8_mixed", save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=2,
        eval_data=samples("llama", 1), load_best_model_at_end=True, learning_rate=0.5,
        metric_for_best_model="eval_loss", callbacks=[Keep(), EarlyStoppingCallback(1)],
    )  # fmt: skip
    mine.train()
    assert mine.state.best_global_step < mine.state.global_step
    assert_same(clone(dict(mine.model.state_dict())), kept[mine.state.best_global_step])


@pytest.mark.parametrize(("level", "level_options", "optim"), [
    ("fp16_mixed", {}, "adamw_torch_fused"), ("msamp_o2", {"half": "fp16"}, "adamw_torch"),
])  # fmt: skip
def test_levels_in_fp16_scale_the_loss_and_skip_a_step_whole(level, level_options, optim, tmp_path):
    rates, scales = [], []

    class Watch(TrainerCallback):
        def on_step_end(self, args, state, control, lr_scheduler=None, **_):
            rates.append(lr_scheduler.get_last_lr()[0])
            scales.append(mine.accelerator.scaler.get_scale())

    mine = trainer(
        tmp_path, level, level_options=level_options, optim=optim, fp16=True, lr_scheduler_type="linear",
        max_grad_norm=1.0, callbacks=[Watch()],
    )  # fmt: skip
    mine.bad = (2,)
    mine.train()
    assert rates[2] == rates[1] and rates[3] < rates[2]
    assert scales[2] == 0.5 * scales[1] == scales[-1]
    assert mine.losses[-1] < mine.losses[0] and isinstance(mine.optimizer.optimizer, LowBitStates) == (
        level == "msamp_o2"
    )


def test_a_model_that_model_init_makes_is_converted_each_time(tmp_path):
    settings = TrainingArguments(
        str(tmp_path), max_steps=2, use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no"
    )
    mine = Recording(
        args=settings, model_init=lambda: make_model("llama"), train_dataset=samples("llama"), level="bf16_mixed"
    )
    models = []
    for _ in range(2):
        mine.train()
        models.append(mine.model)
    assert models[0] is not models[1] and all(Engine.of(m).level.name == "bf16_mixed" for m in models)
    assert mine.losses[:2] == mine.losses[2:]


def test_what_cannot_be_trained_is_refused_before(tmp_path):
    for message, level, error, level_options, options in [
        ("fp16_mixed computes in FP16.*not with 'bf16'", "fp16_mixed", ValueError, {}, {"bf16": True}),
        ("fp16_mixed computes in FP16.*not with 'no'", "fp16_mixed", ValueError, {}, {}),
        ("bf16_mixed computes in BF16.*not with 'fp16'", "bf16_mixed", ValueError, {}, {"fp16": True}),
        ("bf16_full_eval=True would cast", "bf16_mixed", ValueError, {}, {"bf16_full_eval": True}),
        ("max_grad_norm must be 0", "msamp_o2", ValueError, {"gradient_release": True}, {"max_grad_norm": 1.0}),
        ("gradient_accumulation_steps must be 1", "msamp_o2", ValueError, {"gradient_release": True},
         {"gradient_accumulation_steps": 2}),
        ("Unknown precision level", "bf16", ValueError, {}, {}),
        ("GradScalerKwargs", "fp16_mixed", TypeError, {"loss_scale": 8.0}, {"fp16": True}),
    ]:  # fmt: skip
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        with pytest.raises(error, match=message):
            trainer(tmp_path, level, level_options=level_options, **options)

    mine = trainer(tmp_path, "msamp_o2", optim="adagrad")
    with pytest.raises(ValueError, match="Adagrad has no low-bit form"):
        mine.train()
    assert Engine.of(mine.model) is None
    mine = trainer(tmp_path, "bf16_mixed", max_steps=1)
    mine.train()
    own = make_optimizer(mine.model)  # over the parameters of the converted model
    other = LowPrecisionTrainer(
        mine.model, mine.args, train_dataset=mine.train_dataset, level="bf16_mixed", optimizers=(own, None)
    )
    with pytest.raises(ValueError, match="converted already"):
        other.train()


def test_copies_on_several_gpus_are_refused(tmp_path):
    settings = TrainingArguments(str(tmp_path), use_cpu=True)
    settings._n_gpu = 2  # what transformers finds where a process of its own sees two GPUs
    with pytest.raises(ValueError, match=r"2 GPUs by torch\.nn\.DataParallel.*torchrun"):
        LowPrecisionTrainer(make_model("vit"), settings, level="bf16_mixed")


def on_two(rank, folder):
    options = {
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_grad_norm": 1.0, "max_steps": 4,
        "eval_data": samples("llama", 1), "save_strategy": "steps", "save_steps": 2, "logging_steps": 1,
    }  # fmt: skip
    mine = trainer(folder, "msamp_o2", **options)
    mine.evaluate()  # with the plain model, which DistributedDataParallel wraps all the same
    mine.train()
    again = trainer(folder, "msamp_o2", **options)
    again.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    assert again.losses == mine.losses[4:]
    norms = [entry["grad_norm"] for entry in mine.state.log_history if "grad_norm" in entry]
    return {"losses": mine.losses, "norms": norms, "weights": clone(dict(mine.model.state_dict()))}


def test_two_processes_average_accumulate_and_resume(tmp_path):
    first, second = on_processes(2, tmp_path, on_two, str(tmp_path / "run"))
    assert first["losses"] != second["losses"] and first["losses"][-1] < first["losses"][0]
    assert len(first["norms"]) == 4 and first["norms"] == second["norms"]
    assert_same(first["weights"], second["weights"])


@pytest.mark.parametrize(("first", "second"), [("bf16_with_fp8_mixed", "msamp_o2"), ("msamp_o3", "msamp_o3")])
def test_a_second_trainer_goes_on_with_the_trained_model(first, second, tmp_path):
    one = trainer(tmp_path / "one", first, max_steps=2)
    one.train()
    one.save_model()
    losses = []
    for model in (one.model, AutoModelForCausalLM.from_pretrained(tmp_path / "one").train()):
        two = trainer(tmp_path / "two", second, max_steps=3)
        two = Recording(model, two.args, train_dataset=samples("llama"), level=second)
        two.train()
        losses.append(two.losses)
    assert losses[0] == losses[1] and len(losses[0]) == 3


def test_a_copy_of_a_trained_model_is_refused_and_the_model_keeps_its_level(tmp_path):
    one = trainer(tmp_path, "bf16_with_fp8_mixed", max_steps=1)
    one.train()
    two = Recording(copy.deepcopy(one.model), one.args, train_dataset=samples("llama"), level="bf16_mixed")
    with pytest.raises(ValueError, match=r"converted already.*load its state_dict"):
        two.train()
    assert Engine.of(one.model).model is one.model and one.model.dtype == torch.bfloat16
