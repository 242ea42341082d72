"""A real Trainer, stopped and resumed through the callback, against one that never stopped."""

from __future__ import annotations

import os
import signal

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import torch  # noqa: E402
from torch.utils.data import Dataset  # noqa: E402
from transformers import (  # noqa: E402
    EarlyStoppingCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from sharded_ckpt import Keep, UsageError  # noqa: E402
from sharded_ckpt.integrations.transformers import ShardedCheckpointCallback  # noqa: E402

pytestmark = pytest.mark.usefixtures("read_by_the_independent_reader")


class Numbers(Dataset):
    def __init__(self, count=20):
        self.x = torch.linspace(-1, 1, count * 4).reshape(count, 4)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"x": self.x[i], "labels": self.x[i].sum().reshape(1), "i": torch.tensor(i)}


class Net(torch.nn.Module):
    """Dropout makes the random state visible; ``seen`` records the order of the data."""

    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1)
        )
        self.seen = []

    def forward(self, x, labels, i=None):
        if self.training:
            self.seen.append(i.tolist())
        out = self.body(x)
        return {"loss": torch.nn.functional.mse_loss(out, labels), "logits": out}


class StopAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            control.should_training_stop = True


def trainer_for(tmp_path, *, callbacks=(), evaluate=False, count=20, **kwargs):
    arguments = {
        "output_dir": str(tmp_path / "out"),
        "save_strategy": "no",
        "eval_strategy": "no",
        "per_device_train_batch_size": 2,
        "num_train_epochs": 3,
        "learning_rate": 0.05,
        "logging_steps": 2,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 7,
        "remove_unused_columns": False,
    } | kwargs
    torch.manual_seed(0)
    net = Net()
    data = Numbers(count)
    return Trainer(
        net,
        TrainingArguments(**arguments),
        train_dataset=data,
        eval_dataset=data if evaluate else None,
        callbacks=list(callbacks),
    )


def losses(trainer):
    return {e["step"]: e["loss"] for e in trainer.state.log_history if "loss" in e}


@pytest.mark.case("B87", "B88", "B145")
@pytest.mark.parametrize("stop", [7, 10, 14])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_p3_a_resumed_trainer_is_bit_identical_to_one_that_never_stopped(
    tmp_path, stop, accumulate
):
    # 10 batches an epoch; steps 7 and 14 are inside epochs, step 10 is the end of one.
    accumulated = {"gradient_accumulation_steps": accumulate}
    whole = trainer_for(tmp_path, **accumulated)
    whole.train()

    first = trainer_for(tmp_path, callbacks=[StopAt(stop)], **accumulated)
    ShardedCheckpointCallback(tmp_path / "ckpt", save_every=50).attach(first)
    first.train()
    assert first.state.global_step == stop

    torch.manual_seed(99)
    second = trainer_for(tmp_path, **accumulated)
    ShardedCheckpointCallback(tmp_path / "ckpt", save_every=50).attach(second)
    second.train()

    assert second.state.global_step == whole.state.global_step
    assert second.state.epoch == pytest.approx(whole.state.epoch)
    assert first.model.seen + second.model.seen == whole.model.seen
    for name, value in whole.model.state_dict().items():
        assert torch.equal(second.model.state_dict()[name], value), name
    ours, theirs = losses(second), losses(whole)
    assert ours.keys() == theirs.keys()
    # The entry that spans the stop sums only what came after it.
    spans = {s for s in theirs if s - 2 < stop < s}
    assert {s: v for s, v in ours.items() if s not in spans} == {
        s: v for s, v in theirs.items() if s not in spans
    }
    assert (
        second.lr_scheduler.state_dict()["last_epoch"]
        == whole.lr_scheduler.state_dict()["last_epoch"]
    )


def test_a_finished_training_is_not_trained_further(tmp_path):
    for _ in range(2):
        trainer = trainer_for(tmp_path, max_steps=4)
        ShardedCheckpointCallback(tmp_path / "ckpt", save_every=50).attach(trainer)
        trainer.train()
    assert trainer.state.global_step == 4
    assert trainer.model.seen == []


@pytest.mark.parametrize("eval_strategy", ["steps", "epoch"])
def test_the_metrics_of_a_step_are_saved_with_it(tmp_path, eval_strategy):
    trainer = trainer_for(tmp_path, evaluate=True, eval_strategy=eval_strategy, eval_steps=10)
    callback = ShardedCheckpointCallback(
        tmp_path / "ckpt", save_every=10, keep=Keep(last=2, best=1, metric="eval_loss")
    )
    best = []

    class Look(TrainerCallback):
        def on_train_end(self, args, state, control, **kwargs):
            callback.checkpointer.wait()
            best.append(callback.checkpointer.best_step("eval_loss"))

    trainer.add_callback(Look())
    callback.attach(trainer)
    trainer.train()
    evaluated = {e["step"]: e["eval_loss"] for e in trainer.state.log_history if "eval_loss" in e}
    assert set(evaluated) == {10, 20, 30}
    assert best == [min(evaluated, key=evaluated.get)]


def test_the_state_of_other_callbacks_is_restored(tmp_path):
    def run(steps):
        stopper = EarlyStoppingCallback(early_stopping_patience=100)
        trainer = trainer_for(
            tmp_path,
            callbacks=[stopper],
            evaluate=True,
            eval_strategy="steps",
            eval_steps=2,
            max_steps=steps,
            metric_for_best_model="eval_loss",
            greater_is_better=True,  # the loss falls, so patience is used up
            load_best_model_at_end=False,
        )
        ShardedCheckpointCallback(tmp_path / "ckpt").attach(trainer)
        trainer.train()
        return stopper.early_stopping_patience_counter

    used = run(6)
    assert run(6) == used  # nothing is left to train: what is there was restored


def test_sigterm_saves_the_step_and_stops(tmp_path):
    class Preempt(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 4:
                os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    trainer = trainer_for(tmp_path, callbacks=[Preempt()])
    callback = ShardedCheckpointCallback(tmp_path / "ckpt", handle_signals=True).attach(trainer)
    trainer.train()
    assert trainer.state.global_step == 5
    assert signal.getsignal(signal.SIGTERM) == before
    resumed = trainer_for(tmp_path, callbacks=[StopAt(6)])
    ShardedCheckpointCallback(tmp_path / "ckpt").attach(resumed)
    resumed.train()
    assert len(resumed.model.seen) == 1
    assert callback.checkpointer is None


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"save_strategy": "steps"}, "save_strategy='steps'.*set save_strategy='no'"),
        ({"save_total_limit": 2}, "save_total_limit=2.*set save_total_limit=None"),
    ],
)
def test_a_second_saver_is_refused(tmp_path, arguments, says):
    trainer = trainer_for(tmp_path, **arguments)
    ShardedCheckpointCallback(tmp_path / "ckpt", save_every=5).attach(trainer)
    with pytest.raises(UsageError, match=says):
        trainer.train()
    assert not (tmp_path / "ckpt").exists()


def test_an_epoch_that_cannot_be_continued_exactly_is_refused(tmp_path):
    for expected in (None, UsageError):
        trainer = trainer_for(
            tmp_path, callbacks=[StopAt(2)], count=10, gradient_accumulation_steps=2
        )
        ShardedCheckpointCallback(tmp_path / "ckpt").attach(trainer)
        if expected is None:
            trainer.train()
            continue
        with pytest.raises(expected, match="5 batches.*gradient_accumulation_steps=2"):
            trainer.train()
