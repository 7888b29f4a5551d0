"""Metrics of training: steps, loss, gradients, AMP, compilation, data, checkpoints, goodput, ranks."""

from __future__ import annotations

from torchobs.catalog.model import *
from torchobs.catalog.model import (
    ANOMALY_KIND,
    CACHE_RESULT,
    COLLECTIVE_OPERATION,
    COLLECTIVE_OPERATIONS,
    COLLECTIVE_SECONDS_BOUNDS,
    COMPILE_BREAK,
    COMPILE_CACHE,
    COMPILE_CAUSE,
    COMPILE_FAILURE,
    COMPILE_GUARD,
    COMPILE_STAGE,
    DDP_PART,
    EXIT_REASON,
    GOODPUT_STATE,
    GROUP,
    LATE_PHASE,
    LAYER,
    NORM_BOUNDS,
    OPTIMIZER,
    OUTPUT_LAYER,
    PHASE,
    PROCESS_GROUP,
    PROCESS_GROUP_BACKEND,
    RANK_STATE,
    SAVE_RESULT,
    SCALAR,
    SCALER,
    SCHEDULER_MISUSE_KIND,
    SECONDS_BOUNDS,
    SIZE_BOUNDS,
    STALL_PHASE,
    WORKER_STATE,
    Attribute,
    counter,
    gauge,
    histogram,
)

# --- progress -----------------------------------------------------------------------------------------------------------------
STEPS = counter("torchobs.steps", "{step}").described("Training steps completed, including those that a loss scaler skipped.")
STEP_DURATION = histogram("torchobs.step.duration", "s", SECONDS_BOUNDS).described(
    "Time from the end of one step to the end of the next, without evaluation, checkpoints and compilation."
)
STEP_PHASE_TIME = counter("torchobs.step.phase.time", "s", PHASE).described("Time spent in each phase of the steps.")
STEP_DEVICE_TIME = gauge("torchobs.step.device.time", "s", PHASE).described(
    "Time that the CUDA device was in each phase of a step, idle or not, of one step a second."
)
LAST_STEP_TIMESTAMP = gauge("torchobs.last_step.timestamp", "s", survives=True).described(
    "Unix time at which the last step ended."
)
MODEL_CHANGES = counter("torchobs.model_changes", "{change}", quiet=0.0).described(
    "Times that training continued with parameters never trained before (the next fold or trial); baselines are reset then."
)
LOSS = gauge("torchobs.loss", "", survives=True).described(
    "Loss of the last step: the sum over its backward passes, or the value given to torchobs.log(). Finite values only."
)
LEARNING_RATE = gauge("torchobs.learning_rate", "", GROUP, survives=True).described("Learning rate of each parameter group.")
OPTIMIZER_WEIGHT_DECAY = gauge("torchobs.optimizer.weight_decay", "", GROUP, survives=True).described(
    "Weight decay of the first parameter group, and of the next three where it differs."
)
OPTIMIZER_MOMENTUM = gauge("torchobs.optimizer.momentum", "", GROUP, survives=True).described(
    "Momentum, or Adam's beta1, of the first parameter group, and of the next three where it differs."
)
OPTIMIZER_BETA2 = gauge("torchobs.optimizer.beta2", "", GROUP, survives=True).described(
    "Adam's beta2, or RMSprop's alpha, of the first parameter group, and of the next three where it differs."
)
SCHEDULER_STEPS = counter("torchobs.scheduler.steps", "{step}").described(
    "Steps of learning-rate schedulers; a chain of schedulers counts once."
)
SCHEDULER_MISUSE = counter("torchobs.scheduler.misuses", "{scheduler}", SCHEDULER_MISUSE_KIND, quiet=0.0).described(
    "Learning-rate schedulers used wrongly, by kind of misuse."
)
SAMPLES = counter("torchobs.samples", "{sample}", quiet=0.0).described(
    "Samples trained on: those given to torchobs.log(); before the first, inferred: for each batch fetched for training, the "
    "leading dimension of the loader's batch that was last looked at (one in ten seconds, and the first of each iteration)."
)
TOKENS = counter("torchobs.tokens", "{token}", quiet=0.0).described(
    "Tokens trained on, inferred likewise before the first are given to torchobs.log(): the elements of the batch's "
    "two-dimensional integer ids, padding included."
)
MODEL_FLOPS = gauge("torchobs.model.flops", "{operation}").described(
    "Floating-point operations of a training step on this rank, forward and backward: those given to torchobs.log(flops=...), "
    "else 6 for each token and trained parameter and 4 for each frozen one, without embeddings that are only looked up. "
    "Attention scores, recomputation and the optimizer are left out. Absent where no tokens are known."
)
MFU = gauge("torchobs.mfu", "1").described(
    "Model FLOPs utilization: these operations per second of step time, over the dense peak of the rank's devices for the data "
    "type in use. Absent where the device is not in the table of peaks."
)
STEPS_PLANNED = gauge("torchobs.steps.planned", "{step}", survives=True).described(
    "Planned number of steps of the run, if known."
)
STEPS_RESUMED_FROM = gauge("torchobs.steps.resumed_from", "{step}").described(
    "Steps of the run before this process: given to `torchobs.log(resumed_from=...)`, or as the optimizer's state counts them "
    "before its first step; 0 for one that begins anew. Absent if neither says it, as with SGD."
)
EPOCHS = counter("torchobs.epochs", "{epoch}").described("Passes over the training loader begun on this rank since its start.")
GOODPUT_TIME = counter("torchobs.goodput.time", "s", GOODPUT_STATE, quiet=0.0).described(
    "Wall time by use; the states add up to the rank's lifetime. productive: training without waiting for data; startup: "
    "before the first step; idle: after the last one, or when no part of a step was seen for three times the longest step "
    "(at least 10 s)."
)
SCALAR_VALUE = gauge("torchobs.scalar", "", SCALAR, survives=True).described(
    "Last value of each extra number given to torchobs.log()."
)

# --- gradients ----------------------------------------------------------------------------------------------------------------
GRAD_NORM = gauge("torchobs.grad.norm", "", survives=True).described(
    "L2 norm of all gradients before the optimizer's step, unscaled and before clipping (after it, where compiled code clips)."
    " Finite values only."
)
GRAD_NORM_DISTRIBUTION = histogram("torchobs.grad.norm_distribution", "", NORM_BOUNDS).described(
    "Distribution of the total gradient norm over the measured steps."
)
GRAD_INTERVAL = gauge("torchobs.grad.interval", "{step}").described(
    "Steps from one measurement of the gradient norm to the next, at present."
)
GRAD_NORM_RANKS = gauge("torchobs.grad.norm_ranks", "{rank}", survives=True, quiet=1.0).described(
    "Ranks over which the gradient is sharded: their squared norms add up to the whole's. 1 where each rank has all of it, or"
    " the whole's norm, as where sharded gradients are clipped by norm."
)
GRAD_LAYER_NORM = gauge("torchobs.grad.layer.norm", "", LAYER).described(
    "L2 norm of a layer's gradient, of this rank's shard where parameters are sharded."
)
GRAD_LAYER_GROWTH = gauge("torchobs.grad.layer.growth", "1", LAYER, survives=True).described(
    "How many times its usual norm the gradient of the layer was that had grown most in an explosion or a spike of the last ten"
    " minutes; absent for all other layers. At most 8 layers of a rank."
)
GRAD_LAYERS_FOLDED = gauge("torchobs.grad.layers_folded", "{layer}", quiet=0.0).described(
    "Layers without series of their own, combined as 'other'."
)
GRAD_UNMOVED_LAYERS = gauge("torchobs.grad.unmoved_layers", "{layer}", survives=True, quiet=0.0).described(
    "Layers that have learned nothing for a while: gradients too small to change a weight, none, or inputs that are all zero."
)
GRAD_ZERO = gauge("torchobs.grad.zero", "1", quiet=0.0).described(
    "Share of the parameters whose gradient is exactly zero in every element."
)
PARAM_LAYER_NORM = gauge("torchobs.param.layer.norm", "", LAYER).described(
    "L2 norm of a layer's weights (of the first 8 million). From level advanced on."
)
UPDATE_LAYER_RATIO = gauge("torchobs.update.layer.ratio", "1", LAYER).described(
    "Norm of one step's change of a layer's weights, divided by the norm of the weights. From level advanced on."
)
ACTIVATION_LAYER_MEAN_ABS = gauge("torchobs.activation.layer.mean_abs", "", OUTPUT_LAYER).described(
    "Mean absolute value of a layer's output. At level extreme."
)
ACTIVATION_LAYER_STD = gauge("torchobs.activation.layer.std", "", OUTPUT_LAYER).described(
    "Standard deviation of a layer's output. At level extreme."
)
ACTIVATION_LAYER_MAX = gauge("torchobs.activation.layer.max", "", OUTPUT_LAYER).described(
    "Greatest absolute value of a layer's output. At level extreme."
)
ACTIVATION_LAYER_ZERO = gauge("torchobs.activation.layer.zero", "1", OUTPUT_LAYER, quiet=0.0).described(
    "Share of a layer's output that is exactly zero. At level extreme."
)
ACTIVATION_LAYER_NONFINITE = gauge("torchobs.activation.layer.nonfinite", "1", OUTPUT_LAYER, quiet=0.0).described(
    "Share of a layer's output that is NaN or infinite. At level extreme."
)
GRAD_NONFINITE_ELEMENTS = counter("torchobs.grad.nonfinite_elements", "{element}", quiet=0.0).described(
    "Gradient elements that were NaN or infinite in measured steps; on a GPU only in layers that recently had some."
)
GRAD_NONFINITE_STEPS = counter("torchobs.grad.nonfinite_steps", "{step}").described(
    "Measured steps whose gradient norm was NaN or infinite."
)
GRAD_CLIPPED_STEPS = counter("torchobs.grad.clipped_steps", "{step}", quiet=0.0).described(
    "Steps with clipped gradients. The effect of clipping by value is known in measured steps only; clipping in compiled code,"
    " by FSDP1's own method or to a limit on a device is not seen."
)
GRAD_CLIP_MAX_NORM = gauge("torchobs.grad.clip.max_norm", "").described("Threshold for clipping gradients by norm, if used.")
GRAD_CLIP_MAX_VALUE = gauge("torchobs.grad.clip.max_value", "").described("Threshold for clipping gradients by value, if used.")

# --- verdicts -----------------------------------------------------------------------------------------------------------------
ANOMALIES = counter("torchobs.anomalies", "{anomaly}", ANOMALY_KIND).described(
    "Steps judged anomalous, by kind; a loss that has diverged counts once."
)
ANOMALY_ACTIVE = gauge("torchobs.anomaly.active", "", ANOMALY_KIND, quiet=0.0).described(
    "1 while the last measured step was anomalous in this way; of kind `diverged` until the loss comes back."
)

# --- automatic mixed precision ------------------------------------------------------------------------------------------------
AMP_SCALE = gauge("torchobs.amp.scale", "", SCALER).described(
    "Loss scale of each enabled GradScaler; read from a device at most ten times a second."
)
AMP_GROWTH_TRACKER = gauge("torchobs.amp.growth_tracker", "{step}", SCALER).described(
    "Steps without overflow since the loss scale last changed."
)
AMP_SKIP_STREAK = gauge("torchobs.amp.skip_streak", "{step}").described(
    "Steps that a loss scaler has skipped in a row up to now; of several optimizers, the longest streak."
)
AMP_STEPS_SKIPPED = counter("torchobs.amp.steps_skipped", "{step}", quiet=0.0).described(
    "Steps that the loss scaler skipped because of non-finite gradients."
)
AMP_OVERFLOWS = counter("torchobs.amp.overflows", "{step}", OPTIMIZER, quiet=0.0).described(
    "Steps of each optimizer under a loss scaler that found non-finite gradients."
)
AMP_AUTOCAST = gauge(
    "torchobs.amp.autocast",
    "",
    Attribute("device_type", "torch.autocast's device type, e.g. cuda"),
    Attribute("dtype", "data type, e.g. bfloat16; eight pairs at most"),
).described("1 for each data type that autocast uses. With bfloat16 alone there is no loss scaler, and no scale.")

# --- data ---------------------------------------------------------------------------------------------------------------------
DATA_WORKER_START_TIME = counter("torchobs.data.worker_start.time", "s", quiet=0.0).described(
    "Time spent starting the worker processes of data loaders; part of the phase data."
)
DATA_WORKERS = gauge("torchobs.data.workers", "{process}", WORKER_STATE).described(
    "Worker processes of the data loaders being iterated."
)
DATA_WORKERS_DIED = counter("torchobs.data.workers_died", "{process}", quiet=0.0).described(
    "Worker processes of data loaders that were ended by a signal or an error."
)
DATA_BATCHES_READY = gauge("torchobs.data.batches_ready", "{batch}").described(
    "Batches that the workers have finished and training has not used yet; 0 means that training waits for data."
)
DATA_STARVED = gauge("torchobs.data.starved", "", quiet=0.0).described(
    "1 while training waits for data for a fifth of its time or more, judged over a minute and ten steps."
)

# --- compilation --------------------------------------------------------------------------------------------------------------
COMPILE_TIME = counter("torchobs.compile.time", "s", COMPILE_STAGE, quiet=0.0).described(
    "Time that torch.compile kept the rank's threads busy; the stages add up. dynamo: tracing and guards; aot: AOTAutograd, or "
    "another backend; inductor: lowering and code generation; kernels: compilers, autotuning and recording of CUDA graphs."
)
COMPILE_COMPILATIONS = counter("torchobs.compile.compilations", "{compilation}", COMPILE_CAUSE, quiet=0.0).described(
    "Compilations of functions, and of their parts after graph breaks."
)
COMPILE_RECOMPILES = counter("torchobs.compile.recompiles", "{compilation}", COMPILE_GUARD, quiet=0.0).described(
    "Recompilations by the kind of the guard that failed."
)
COMPILE_FAILURES = counter("torchobs.compile.failures", "{compilation}", COMPILE_FAILURE, quiet=0.0).described(
    "Failed compilations: the function runs uncompiled, or raises (fullgraph=True)."
)
COMPILE_GRAPH_BREAKS = counter("torchobs.compile.graph_breaks", "{break}", COMPILE_BREAK, quiet=0.0).described(
    "Graph breaks, counted in each compilation that has them."
)
COMPILE_CACHE_LOOKUPS = counter("torchobs.compile.cache.lookups", "{lookup}", COMPILE_CACHE, CACHE_RESULT, quiet=0.0).described(
    "Lookups in the caches of compiled code: a warm start hits."
)
COMPILE_IN_PROGRESS = gauge("torchobs.compile.in_progress", "").described("1 while torch.compile is compiling in any thread.")

# --- checkpoints --------------------------------------------------------------------------------------------------------------
CHECKPOINTS = counter("torchobs.checkpoints", "{checkpoint}", SAVE_RESULT, quiet=0.0).described(
    "Checkpoints by torch.save, safetensors and torch.distributed.checkpoint. All saves between two steps are one; saves to "
    "memory count from 64 KiB on; each save that raised is a failed one. Not seen: `from torch import save` before `init()`."
)
CHECKPOINT_FAILURE_STREAK = gauge("torchobs.checkpoint.failure_streak", "{checkpoint}", survives=True, quiet=0.0).described(
    "Saves that raised since the last one that succeeded."
)
CHECKPOINT_TIMESTAMP = gauge("torchobs.checkpoint.timestamp", "s", survives=True).described(
    "Unix time at which the last checkpoint was complete."
)
CHECKPOINT_DURATION = gauge("torchobs.checkpoint.duration", "s", survives=True).described(
    "Duration of the last checkpoint until it was complete; the time that training waited is the goodput state checkpoint."
)
CHECKPOINT_SIZE = gauge("torchobs.checkpoint.size", "By", survives=True).described(
    "Bytes that this rank wrote for the last checkpoint."
)

# --- distributed training -----------------------------------------------------------------------------------------------------
DISTRIBUTED_WORLD_SIZE = gauge("torchobs.distributed.world_size", "{rank}").described("Ranks in the default process group.")
DISTRIBUTED_COPIES = gauge("torchobs.distributed.copies", "{rank}", quiet=1.0).described(
    "Ranks that are given the same batch, where the mesh is known: the product of its tensor-, pipeline- and context-parallel "
    "dimensions."
)
DISTRIBUTED_COORDINATES = gauge(
    "torchobs.distributed.coordinates",
    "",
    Attribute("dp", "index in data parallelism; shards count first where it is replicated, too"),
    Attribute("tp", "index in tensor parallelism"),
    Attribute("pp", "pipeline stage"),
    Attribute("cp", "index in context parallelism"),
    Attribute("ep", "index in expert parallelism"),
    survives=True,
).described(
    "Constant 1; its labels are the rank's place, from 0, on each known axis of parallelism: by the names of device-mesh"
    " dimensions, or by Megatron's or DeepSpeed's parallel state. A join on rank and instance groups other series by them."
)
DISTRIBUTED_INFO = gauge(
    "torchobs.distributed.info",
    "",
    Attribute("backend", "of the default process group, e.g. nccl"),
    Attribute("parallelism", "recognised kinds: ddp, fsdp1, fsdp2, hsdp, tensor; joined by +"),
    Attribute("mesh", "dimensions of the device mesh, e.g. dp=4,tp=2"),
    survives=True,
).described("Constant 1; its labels say how the training is spread over ranks.")
DDP_TIME = gauge("torchobs.ddp.time", "s", DDP_PART).described(
    "Time in the iteration that DistributedDataParallel timed last: each of its first ten, then one in a hundred."
)
DDP_BUCKETS = gauge("torchobs.ddp.buckets", "{bucket}").described("Gradient buckets; each is one all-reduce.")
DDP_BUCKET_SIZE = gauge("torchobs.ddp.bucket.size", "By").described("Size of the largest gradient bucket.")
DDP_UNUSED_SIZE = gauge("torchobs.ddp.unused.size", "By").described(
    "Size of the parameters unused in the iteration timed last, with find_unused_parameters."
)
DDP_INFO = gauge(
    "torchobs.ddp.info",
    "",
    Attribute("find_unused_parameters", "whether it searches for unused parameters in every iteration", ("true", "false")),
    Attribute("static_graph", "whether the graph was declared static", ("true", "false")),
    Attribute("gradient_as_bucket_view", "whether gradients live in the buckets", ("true", "false")),
    Attribute("comm_hook", "the communication hook's name, if there is one"),
    survives=True,
).described("Constant 1; its labels are the settings of DistributedDataParallel.")
COLLECTIVE_ENQUEUED = gauge("torchobs.collective.enqueued", "", PROCESS_GROUP_BACKEND, PROCESS_GROUP, survives=True).described(
    "Sequence number of the last collective that this rank has called in a process group of several, as the group counts it:"
    " the same on all its ranks, but for those in flight. In a hang the lowest is that of the rank that did not come."
)
COLLECTIVE_COMPLETED = gauge("torchobs.collective.completed", "", PROCESS_GROUP_BACKEND, PROCESS_GROUP).described(
    "Sequence number of the last collective of a process group that has come back on this rank. Absent while training moves."
)
COLLECTIVE_PENDING_AGE = gauge(
    "torchobs.collective.pending.age", "s", PROCESS_GROUP_BACKEND, PROCESS_GROUP, COLLECTIVE_OPERATION
).described(
    "Time since this rank called its oldest collective that has not come back, where neither a step nor a collective has ended"
    " for ten seconds; 0: nothing waits here. Absent while training moves."
)
COLLECTIVE_PENDING_SIZE = gauge(
    "torchobs.collective.pending.size", "By", PROCESS_GROUP_BACKEND, PROCESS_GROUP, COLLECTIVE_OPERATION
).described("Size of that collective's input on this rank.")
COLLECTIVE_INPUT = counter(
    "torchobs.collective.input", "By", Attribute("operation", "which collective", COLLECTIVE_OPERATIONS[1:])
).described(
    "Size of what this rank gave to collectives, of those that torch's flight recorder still holds every ten seconds: the last"
    " 2,000 by default. From level advanced on."
)
COLLECTIVE_SIZE = histogram("torchobs.collective.size", "By", SIZE_BOUNDS).described(
    "Size of the input of each of these collectives. From level advanced on."
)
COLLECTIVE_DURATION = histogram("torchobs.collective.duration", "s", COLLECTIVE_SECONDS_BOUNDS).described(
    "Duration of each of these collectives on the device, where it is recorded: by NCCL with TORCH_NCCL_ENABLE_TIMING=1. From"
    " level advanced on."
)

# --- ranks, as the exporter sees them -----------------------------------------------------------------------------------------
RANK_STATE_SET = gauge("torchobs.rank.state", "", RANK_STATE, survives=True).described("1 for the state that the rank is in.")
RANK_UP = gauge("torchobs.rank.up", "", survives=True).described("1 while the rank's process lives.")
RANK_HEARTBEAT_TIMESTAMP = gauge("torchobs.rank.heartbeat.timestamp", "s", survives=True).described(
    "Unix time of the rank's last heartbeat."
)
RANK_PROGRESS_AGE = gauge("torchobs.rank.progress.age", "s").described(
    "Time since the rank last finished a step (since its start, before the first)."
)
RANK_START_TIME = gauge("torchobs.rank.start_time", "s", survives=True).described(
    "Unix time at which torchobs started in the rank."
)
RANK_RESTARTS = counter("torchobs.rank.restarts", "{restart}").described("Times the launcher has restarted the rank.")
RANK_SLOWDOWN = gauge("torchobs.rank.slowdown", "1").described(
    "Rank's step time over what it would be if its peers on this machine did not wait for it."
)
RANK_EXCESS = gauge("torchobs.rank.excess", "s", LATE_PHASE).described(
    "Time per step that the rank's peers on this machine wait for it, by the phase in which it is late."
)
RANK_BEHIND = gauge("torchobs.rank.behind", "{step}").described(
    "Steps by which the rank is behind the furthest rank of its replica group on this machine."
)
RANK_STALL_POSITION = gauge("torchobs.rank.stall.position", "{step}", STALL_PHASE).described(
    "Where the rank is while a rank of its replica group on this machine hangs: steps done, and a fifth for each phase of the"
    " next that is behind it. The ranks with the lowest are those that the others likely wait for; absent while none hangs."
)
RUN_LOCAL_RANKS = gauge("torchobs.run.local_ranks", "{rank}").described("Ranks of the run that live on this machine.")
RUN_MISSING_RANKS = gauge("torchobs.run.missing_ranks", "{rank}").described(
    "Ranks that the launcher started on this machine and that the exporter does not see."
)
RUN_STEP_SPREAD = gauge("torchobs.run.step_spread", "{step}").described(
    "Steps between the first and the last rank on this machine, the most of any replica group."
)
RUN_GRAD_NORM = gauge("torchobs.run.grad_norm", "").described(
    "L2 norm of the whole gradient, combined from all ranks, if all are on this machine."
)
RANK_EXIT = gauge("torchobs.rank.exit", "", EXIT_REASON, survives=True).described(
    "1 for the way in which the rank ended; absent while it lives."
)
RANK_EXCEPTION = gauge(
    "torchobs.rank.exception",
    "",
    Attribute("exception.type", "its class"),
    Attribute("message", "first line of its message, without secrets, at most 100 characters; absent if it has none"),
    Attribute("location", "innermost file:line of the user's own code, else where it was raised"),
    survives=True,
).described("Constant 1 for the exception that ended the rank; absent while it lives, and if no exception ended it.")
PROCESS_CHILDREN = gauge("torchobs.rank.process.children", "{process}", quiet=0.0).described(
    "Processes that descend from the rank's: DataLoader workers, compilers."
)
PROCESS_THREADS = gauge("torchobs.rank.process.threads", "{thread}").described("Threads of the rank's process.")
PROCESS_OPEN_FILES = gauge("torchobs.rank.process.open_fds", "{file}").described(
    "File descriptors that the rank's process has open."
)
PROCESS_MAX_FILES = gauge("torchobs.rank.process.max_fds", "{file}").described("File descriptors that it may have open.")
RANK_INFO = gauge("torchobs.rank.info", "", survives=True).described("Constant 1; its labels describe the rank.")
WORLD_SIZE = gauge("torchobs.world_size", "{rank}", survives=True).described("Ranks in the run, as its launcher says.")
