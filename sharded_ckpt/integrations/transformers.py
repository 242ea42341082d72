"""Checkpoints of a Hugging Face ``Trainer``, as a callback.

::

    callback = ShardedCheckpointCallback("runs/gpt", save_every=500, keep=Keep(last=3))
    args = TrainingArguments(..., save_strategy="no")
    trainer = Trainer(model, args, ...)
    callback.attach(trainer)
    trainer.train()                # begins, or goes on from the newest committed step

Only this module imports transformers, and nothing of the package imports this module.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import sys
from collections.abc import Mapping
from typing import Any

from transformers import TrainerCallback

from sharded_ckpt import rng
from sharded_ckpt.checkpointer import ShardedCheckpointer
from sharded_ckpt.errors import UsageError

log = logging.getLogger(__name__)

# What of TrainerState belongs to the training so far, rather than to the arguments of this run.
_RESTORED = (
    "global_step",
    "epoch",
    "num_input_tokens_seen",
    "total_flos",
    "log_history",
    "best_metric",
    "best_global_step",
)


class ShardedCheckpointCallback(TrainerCallback):  # type: ignore[misc]
    """Saves with :class:`ShardedCheckpointer` while a ``Trainer`` trains, and resumes from it.

    ``options`` go to :class:`ShardedCheckpointer` (``save_every``, ``keep``, ``on_event``, ...).
    ``handle_signals=True`` saves and stops on SIGTERM and SIGUSR1. The last step is always saved.

    A step is saved when its log entry and its evaluation, if there is one, are done, so its
    metrics are known and ``Keep(best=1, metric="eval_loss")`` works. On a signal it is saved at
    once, and not evaluated.

    What ``trainer.train()`` restores, without ``resume_from_checkpoint``: weights, optimizer,
    learning rate scheduler, random number generators, and from ``TrainerState`` the step, the log
    history, counters and the best metric. The data goes on with the next batch: the epochs and
    batches already seen are skipped, which for a map-style dataset with the Trainer's own sampler
    gives the same order as a run that never stopped. Skipped batches are still loaded, as the
    Trainer itself does; ``ignore_data_skip=True`` starts the data over. Randomness inside data
    loading (augmentation, dynamic masking) is not replayed. After :meth:`attach`, a gradient scaler
    and the state of callbacks such as ``EarlyStoppingCallback`` are restored too, and the first
    logged loss is right; without it, that one value is too low. DeepSpeed needs :meth:`attach`,
    since a callback is not given the engine.

    Raises ``UsageError`` when training begins with arguments that would save a second time.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        handle_signals: bool = False,
        **options: Any,
    ) -> None:
        self._directory = directory
        self._handle_signals = handle_signals
        self._options = options
        self._trainer: Any = None
        self._ckpt: ShardedCheckpointer | None = None
        self._forget()

    def _forget(self) -> None:
        self._due = False
        self._saved_step = -1
        self._metrics: dict[str, float] = {}
        self._first_epoch = 0
        self._shift = 0
        self._epoch_offset = 0.0
        self._rng: dict[str, Any] | None = None

    @property
    def checkpointer(self) -> ShardedCheckpointer | None:
        """The checkpointer of the training under way."""
        return self._ckpt

    def attach(self, trainer: Any) -> ShardedCheckpointCallback:
        """Adds the callback to ``trainer``, whose engine, scaler and callbacks it may then see."""
        self._trainer = trainer
        if self not in trainer.callback_handler.callbacks:
            trainer.add_callback(self)
        return self

    # -- called by the Trainer ---------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        _check_arguments(args)
        self._forget()
        self._ckpt = self._open(kwargs)
        if self._handle_signals:
            self._ckpt.install_signal_handlers()
        result = self._ckpt.load()
        self._saved_step = result.step if result.id is not None else -1
        saved = result.client_state if isinstance(result.client_state, dict) else {}
        if "trainer_state" in saved:
            self._restore_state(state, saved["trainer_state"])
            self._skip_data(args, state, kwargs["train_dataloader"])

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._shift = self._first_epoch

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._save_if_due(state)
        if self._rng is not None:
            # Making the data iterator drew a random number, which the run that never stopped drew
            # at the beginning of the epoch.
            rng.restore(self._rng)
            self._rng = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self._ckpt is not None
        state.epoch += self._epoch_offset
        self._metrics = {}
        self._due = self._ckpt.should_save(state.global_step)
        if self._ckpt.should_stop:
            control.should_training_stop = True
            control.should_evaluate = False
            self._save_if_due(state)

    def on_evaluate(
        self,
        args: Any,
        state: Any,
        control: Any,
        metrics: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        numbers = {k: v for k, v in (metrics or {}).items() if isinstance(v, (int, float))}
        self._metrics = {name: float(value) for name, value in numbers.items()}
        self._save_if_due(state)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not control.should_evaluate:
            self._save_if_due(state)
        # The part of an epoch that was skipped belongs to the first epoch of this run alone.
        loader: Any = kwargs.get("train_dataloader")
        if getattr(loader, "skip_batches", 0):
            loader.skip_batches = 0
            self._epoch_offset = float(self._first_epoch)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._ckpt is None:
            return
        try:
            self._due = self._due or state.global_step > self._saved_step
            self._save_if_due(state)
        finally:
            ckpt, self._ckpt = self._ckpt, None
            ckpt.close()

    # -- inside ------------------------------------------------------------------------------

    def _open(self, kwargs: Mapping[str, Any]) -> ShardedCheckpointer:
        optimizer = kwargs["optimizer"]
        options = dict(self._options)
        if type(optimizer).__name__ == "DeepSpeedOptimizerWrapper":
            if self._trainer is None:
                raise UsageError(
                    "a callback is not given the DeepSpeed engine; call callback.attach(trainer) "
                    "before trainer.train()"
                )
            return ShardedCheckpointer(self._trainer.model_wrapped, self._directory, **options)
        scaler = getattr(getattr(self._trainer, "accelerator", None), "scaler", None)
        if scaler is not None:
            options["stateful"] = {**(options.get("stateful") or {}), "grad_scaler": scaler}
        return ShardedCheckpointer(
            kwargs["model"],
            self._directory,
            # accelerate's wrapper holds the optimizer whose step changes the parameters.
            optimizer=getattr(optimizer, "optimizer", optimizer),
            scheduler=kwargs["lr_scheduler"],
            **options,
        )

    def _save_if_due(self, state: Any) -> None:
        if not self._due or self._ckpt is None:
            return
        self._due = False
        if self._trainer is not None:
            self._trainer.store_flos()
        self._ckpt.save(
            state.global_step,
            client_state={"trainer_state": self._state_to_json(state)},
            metrics=self._metrics,
        )
        self._saved_step = state.global_step

    def _state_to_json(self, state: Any) -> dict[str, Any]:
        plain = dataclasses.asdict(state)
        plain["stateful_callbacks"] = {
            type(callback).__name__: callback.state()["attributes"]
            for callback in self._stateful_callbacks()
        }
        as_json = json.loads(json.dumps(plain, default=_as_number))
        assert isinstance(as_json, dict)
        return as_json

    def _stateful_callbacks(self) -> list[Any]:
        if self._trainer is None:
            return []
        callbacks = self._trainer.callback_handler.callbacks
        return [one for one in callbacks if callable(getattr(one, "state", None))]

    def _restore_state(self, state: Any, saved: Mapping[str, Any]) -> None:
        for name in _RESTORED:
            if name in saved:
                setattr(state, name, saved[name])
        attributes = saved.get("stateful_callbacks", {})
        for callback in self._stateful_callbacks():
            for name, value in attributes.get(type(callback).__name__, {}).items():
                setattr(callback, name, value)
        if self._trainer is not None:
            # The Trainer noted these before it called us; they divide the first logged loss.
            self._trainer._globalstep_last_logged = state.global_step
            self._trainer._initial_global_step = state.global_step
            self._trainer._initial_num_input_tokens_seen = state.num_input_tokens_seen

    def _skip_data(self, args: Any, state: Any, loader: Any) -> None:
        """Makes ``loader`` go on behind the batches of the steps so far."""
        if state.global_step >= state.max_steps:
            log.info("training had reached its last step, %d; nothing is left", state.global_step)
            loader.skip_batches = sys.maxsize
            return
        if args.ignore_data_skip:
            return
        if not hasattr(loader, "skip_batches") or not hasattr(loader, "set_epoch"):
            log.warning(
                "%s cannot skip batches: the data starts over, while the step goes on at %d",
                type(loader).__name__,
                state.global_step,
            )
            return
        accumulate = args.gradient_accumulation_steps
        batches = _length(loader) or state.max_steps * accumulate
        steps = max(1, -(-batches // accumulate))
        self._first_epoch, done = divmod(state.global_step, steps)
        if done and batches % accumulate:
            raise UsageError(
                f"step {state.global_step} is inside an epoch of {batches} batches, whose last "
                f"optimizer step has fewer than gradient_accumulation_steps={accumulate}; the "
                "Trainer would mix it into the next epoch. Resume at the end of an epoch, choose "
                "numbers that divide, or set ignore_data_skip=True to start the data over"
            )
        loader.skip_batches = done * accumulate
        self._epoch_offset = self._first_epoch + done * accumulate / batches
        set_epoch = loader.set_epoch

        def shifted(epoch: int) -> None:
            # The Trainer counts the epochs of this run from 0, samplers shuffle by the true
            # number. It calls once an epoch; the loader then calls with the number it was given.
            shift, self._shift = self._shift, 0
            set_epoch(epoch + shift)

        loader.set_epoch = shifted
        if done:
            self._rng = rng.capture()


def _check_arguments(args: Any) -> None:
    strategy = getattr(args.save_strategy, "value", args.save_strategy)
    for name, value, right in (
        ("save_strategy", strategy, "no"),
        ("save_total_limit", args.save_total_limit, None),
        ("enable_jit_checkpoint", getattr(args, "enable_jit_checkpoint", False), False),
    ):
        if value != right:
            raise UsageError(
                f"TrainingArguments({name}={value!r}) makes the Trainer save or delete checkpoints "
                f"as well; set {name}={right!r} and give save_every=, keep= and handle_signals= to "
                "ShardedCheckpointCallback"
            )


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None


def _as_number(value: Any) -> Any:
    """numpy and torch scalars in log entries, as JSON can hold them."""
    return value.item() if hasattr(value, "item") else str(value)
