"""What :mod:`torchobs.diagnosis.health` calls phases, ends of ranks, and kinds of anomalies."""

AT_WORK = {"evaluation": "Evaluating", "checkpoint": "Saving a checkpoint", "compile": "Compiling", "idle": "Idle"}
ENDINGS = {
    "exception": "failed {ago} ago with an exception",
    "exit_code": "failed {ago} ago with an exit status",
    "interrupted": "was interrupted {ago} ago",
    "terminated": "was told to end {ago} ago",
    "crashed": "crashed {ago} ago",
    "out_of_memory": "was lost {ago} ago, likely out of memory",
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
