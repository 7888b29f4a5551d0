"""What :mod:`torchobs.diagnosis.health` calls phases, ends of ranks, kinds of anomalies, and mistakes of training loops."""

AT_WORK = {"evaluation": "Evaluating", "checkpoint": "Saving a checkpoint", "compile": "Compiling", "idle": "Idle"}
ENDINGS = {
    "exception": "failed{ago} with an exception",
    "exit_code": "failed{ago} with an exit status",
    "interrupted": "was interrupted{ago}",
    "terminated": "was told to end{ago}",
    "crashed": "crashed{ago}",
    "out_of_memory": "was lost{ago}, likely out of memory",
}
ANOMALIES = {
    "nonfinite_loss": "The loss is not finite",
    "nonfinite_gradient": "Gradients are not finite",
    "gradient_explosion": "Gradients explode",
    "loss_spike": "The loss has jumped",
    "gradient_vanishing": "Gradients vanish",
    "diverged": "The loss has diverged: it left its start for good in the first steps",
}
PAST = {
    "nonfinite_loss": ("loss that was not finite", "losses that were not finite"),
    "nonfinite_gradient": ("gradient that was not finite", "gradients that were not finite"),
    "gradient_explosion": ("gradient explosion", "gradient explosions"),
    "loss_spike": ("loss spike", "loss spikes"),
    "gradient_vanishing": ("vanishing gradient", "vanishing gradients"),
    "diverged": ("loss that diverged", "losses that diverged"),
}
STUCK = {
    "cut_off": "no gradient reaches {them}",
    "vanishing": "only a tiny gradient reaches {them}",
    "dead_units": "only zeros come into {them}, from dead units",
    "no_gradient": "the optimizer gets no gradient for {them}",
}
"""Why layers learn nothing"""
MISTAKES = {
    "gradients_kept": "Gradients are never set to zero (optimizer.zero_grad()).",
    "evaluation_mode": "It trains in evaluation mode: model.train() is not called again.",
    "never_stepped": "The optimizer never steps.",
    "losses_kept": "Losses are kept with their graphs.",
    "same_order": "Each epoch has the same order: sampler.set_epoch() is not called.",
    "clipped_late": "Gradients are clipped after the optimizer's step, which has used them.",
    "left_out": "Parameters get gradients and are in no optimizer that steps: nothing is learned there.",
    "scheduler_before_optimizer": "A learning-rate scheduler is stepped before its optimizer's first step.",
    "scheduler_never_stepped": "A learning-rate scheduler is never stepped: the rate does not follow it.",
    "scheduler_idle_optimizer": "A learning-rate scheduler is stepped whose optimizer does not step.",
}
"""What ``loop_mistakes`` says at more length, and ``numerics`` of schedulers"""
UNTIL_A_STEP = frozenset({"never_stepped"})
"""Those of a run without a step: a first one may come after hundreds of micro-batches"""
