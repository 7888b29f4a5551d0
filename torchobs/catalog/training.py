"""Metrics of training: steps, loss, gradients, AMP, compilation, data, checkpoints, goodput, ranks."""

from __future__ import annotations

from torchobs.catalog.model import *

# --- progress -----------------------------------------------------------------------------------------------------------------
STEPS = counter("torchobs.steps", "{step}").described("Training steps completed, including those that a loss scaler skipped.")
STEP_DURATION = histogram("torchobs.step.duration", "s", SECONDS_BOUNDS).described(
    "Time from one step's end to the next one's, without evaluation, checkpoints and compilation."
)
STEP_PHASE_TIME = counter("torchobs.step.phase.time", "s", PHASE).described("Time spent in each phase of the steps.")
STEP_DEVICE_TIME = gauge("torchobs.step.device.time", "s", PHASE).described(
    "The CUDA device's time in each phase of a step, idle or not; one step a second."
)
LAST_STEP_TIMESTAMP = gauge("torchobs.last_step.timestamp", "s", survives=True).described(
    "Unix time at which the last step ended."
)
MODEL_CHANGES = counter("torchobs.model_changes", "{change}", quiet=0.0).described(
    "Times that training went on with new parameters (next fold or trial); baselines begin anew."
)
LOSS = gauge("torchobs.loss", "", survives=True).described(
    "Last finite loss: summed over the step's backward passes, or as given to torchobs.log()."
)
LEARNING_RATE = gauge("torchobs.learning_rate", "", GROUP, survives=True).described("Learning rate of each parameter group.")
OPTIMIZER_WEIGHT_DECAY = gauge("torchobs.optimizer.weight_decay", "", GROUP, survives=True).described(
    "Weight decay by parameter group."
)
OPTIMIZER_MOMENTUM = gauge("torchobs.optimizer.momentum", "", GROUP, survives=True).described(
    "Momentum, or Adam's beta1, by parameter group."
)
OPTIMIZER_BETA2 = gauge("torchobs.optimizer.beta2", "", GROUP, survives=True).described(
    "Adam's beta2, or RMSprop's alpha, by parameter group."
)
SCHEDULER_STEPS = counter("torchobs.scheduler.steps", "{step}").described(
    "Steps of learning-rate schedulers; a chain counts once."
)
SCHEDULER_MISUSE = counter("torchobs.scheduler.misuses", "{scheduler}", SCHEDULER_MISUSE_KIND, quiet=0.0).described(
    "Learning-rate schedulers used wrongly."
)
SAMPLES = counter("torchobs.samples", "{sample}", quiet=0.0).described(
    "Samples trained on, as given to torchobs.log(), else inferred from batches."
)
TOKENS = counter("torchobs.tokens", "{token}", quiet=0.0).described(
    "Tokens trained on, as given to torchobs.log(), else inferred, with padding."
)
MODEL_PARAMETERS = gauge(
    "torchobs.model.parameters", "{parameter}", Attribute("state", "", ("trainable", "frozen")), survives=True
).described("Elements of the parameters of the models that are trained.")
MODEL_FLOPS = gauge("torchobs.model.flops", "{operation}").described(
    "FLOPs of a step on this rank, as given to torchobs.log(flops=...), else estimated."
)
MFU = gauge("torchobs.mfu", "1").described("Model FLOPs utilization: these FLOPs per second of step time, over the dense peak.")
STEPS_PLANNED = gauge("torchobs.steps.planned", "{step}", survives=True).described("Planned steps of the run, if known.")
STEPS_RESUMED_FROM = gauge("torchobs.steps.resumed_from", "{step}").described(
    "Steps before this process, from `torchobs.log(resumed_from=...)` or what was loaded; absent if unknown."
)
EPOCHS = counter("torchobs.epochs", "{epoch}").described("Passes over the training loader begun.")
GOODPUT_TIME = counter("torchobs.goodput.time", "s", GOODPUT_STATE, quiet=0.0).described(
    "Wall time by use, adding up to the rank's lifetime."
)
SCALAR_VALUE = gauge("torchobs.scalar", "", SCALAR, survives=True).described(
    "Last value of each extra number given to torchobs.log()."
)

# --- gradients ----------------------------------------------------------------------------------------------------------------
GRAD_NORM = gauge("torchobs.grad.norm", "", survives=True).described(
    "Last finite L2 norm of all gradients, unscaled and before clipping (compiled clipping: after it)."
)
GRAD_NORM_DISTRIBUTION = histogram("torchobs.grad.norm_distribution", "", NORM_BOUNDS).described(
    "Total gradient norm over the measured steps."
)
GRAD_INTERVAL = gauge("torchobs.grad.interval", "{step}").described(
    "Steps from one measurement of the gradient norm to the next."
)
GRAD_NORM_RANKS = gauge("torchobs.grad.norm_ranks", "{rank}", survives=True, quiet=1.0).described(
    "Ranks over which squared gradient norms are summed; 1: each rank has the whole norm."
)
GRAD_LAYER_NORM = gauge("torchobs.grad.layer.norm", "", LAYER).described(
    "L2 norm of a layer's gradient, or of this rank's shard."
)
GRAD_LAYER_GROWTH = gauge("torchobs.grad.layer.growth", "1", LAYER, survives=True).described(
    "Gradient norm over its usual one, of the layer that grew most, for ten minutes after an explosion or spike."
)
GRAD_LAYERS_FOLDED = gauge("torchobs.grad.layers_folded", "{layer}", quiet=0.0).described(
    "Layers without series of their own, combined as 'other'."
)
GRAD_UNMOVED_LAYERS = gauge("torchobs.grad.unmoved_layers", "{layer}", survives=True, quiet=0.0).described(
    "Layers that learn nothing: gradients tiny or missing, or inputs all zero."
)
GRAD_ZERO = gauge("torchobs.grad.zero", "1", quiet=0.0).described("Share of the parameters with a gradient of zeros alone.")
PARAM_LAYER_NORM = gauge("torchobs.param.layer.norm", "", LAYER).described(
    "L2 norm of a layer's weights (the first 8 million). From level advanced on."
)
UPDATE_LAYER_RATIO = gauge("torchobs.update.layer.ratio", "1", LAYER).described(
    "Change of a layer's weights in one step, relative to their norm. From level advanced on."
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
    "NaN or infinite gradient elements in measured steps; on a GPU, of layers that recently had some."
)
GRAD_NONFINITE_STEPS = counter("torchobs.grad.nonfinite_steps", "{step}").described(
    "Measured steps with a NaN or infinite gradient norm."
)
GRAD_CLIPPED_STEPS = counter("torchobs.grad.clipped_steps", "{step}", quiet=0.0).described(
    "Steps with clipped gradients; by value in measured steps only. Compiled or FSDP1's clipping is not seen."
)
GRAD_CLIP_MAX_NORM = gauge("torchobs.grad.clip.max_norm", "").described("Threshold for clipping by norm.")
GRAD_CLIP_MAX_VALUE = gauge("torchobs.grad.clip.max_value", "").described("Threshold for clipping by value.")

# --- verdicts -----------------------------------------------------------------------------------------------------------------
ANOMALIES = counter("torchobs.anomalies", "{anomaly}", ANOMALY_KIND).described(
    "Anomalous steps; a loss that has diverged counts once."
)
ANOMALY_ACTIVE = gauge("torchobs.anomaly.active", "", ANOMALY_KIND, quiet=0.0).described(
    "1 while the last measured step was anomalous, or the loss stays diverged."
)

# --- automatic mixed precision ------------------------------------------------------------------------------------------------
AMP_SCALE = gauge("torchobs.amp.scale", "", SCALER).described("Loss scale, read from a device at most ten times a second.")
AMP_GROWTH_TRACKER = gauge("torchobs.amp.growth_tracker", "{step}", SCALER).described(
    "Steps without overflow since the loss scale last changed."
)
AMP_SKIP_STREAK = gauge("torchobs.amp.skip_streak", "{step}").described(
    "Steps skipped in a row by a loss scaler up to now; the longest streak of several optimizers."
)
AMP_STEPS_SKIPPED = counter("torchobs.amp.steps_skipped", "{step}", quiet=0.0).described(
    "Steps skipped by the loss scaler because of non-finite gradients."
)
AMP_OVERFLOWS = counter("torchobs.amp.overflows", "{step}", OPTIMIZER, quiet=0.0).described(
    "Steps with non-finite gradients under a loss scaler."
)
AMP_AUTOCAST = gauge(
    "torchobs.amp.autocast", "", Attribute("device_type", "e.g. cuda"), Attribute("dtype", "e.g. bfloat16")
).described("1 for each data type that autocast uses.")

# --- data ---------------------------------------------------------------------------------------------------------------------
DATA_WORKER_START_TIME = counter("torchobs.data.worker_start.time", "s", quiet=0.0).described(
    "Time spent starting data loaders' workers; part of the phase data."
)
DATA_WORKERS = gauge("torchobs.data.workers", "{process}", WORKER_STATE).described(
    "Worker processes of the data loaders in use."
)
DATA_WORKERS_DIED = counter("torchobs.data.workers_died", "{process}", quiet=0.0).described(
    "Data loaders' workers ended by a signal or an error."
)
DATA_BATCHES_READY = gauge("torchobs.data.batches_ready", "{batch}").described(
    "Finished batches not used yet; 0: training waits for data."
)
DATA_STARVED = gauge("torchobs.data.starved", "", quiet=0.0).described(
    "1 while training waits for data for a fifth of its time or more, over a minute and ten steps."
)

# --- compilation --------------------------------------------------------------------------------------------------------------
COMPILE_TIME = counter("torchobs.compile.time", "s", COMPILE_STAGE, quiet=0.0).described(
    "Time that torch.compile kept the rank's threads busy; the stages add up. kernels includes autotuning."
)
COMPILE_COMPILATIONS = counter("torchobs.compile.compilations", "{compilation}", COMPILE_CAUSE, quiet=0.0).described(
    "Compilations of functions, and of their parts after graph breaks."
)
COMPILE_RECOMPILES = counter("torchobs.compile.recompiles", "{compilation}", COMPILE_GUARD, quiet=0.0).described(
    "Recompilations by the guard that failed."
)
COMPILE_FAILURES = counter("torchobs.compile.failures", "{compilation}", COMPILE_FAILURE, quiet=0.0).described(
    "Failed compilations: the function runs uncompiled, or raises (fullgraph=True)."
)
COMPILE_GRAPH_BREAKS = counter("torchobs.compile.graph_breaks", "{break}", COMPILE_BREAK, quiet=0.0).described(
    "Graph breaks, in each compilation that has them."
)
COMPILE_CACHE_LOOKUPS = counter("torchobs.compile.cache.lookups", "{lookup}", COMPILE_CACHE, CACHE_RESULT, quiet=0.0).described(
    "Lookups in caches of compiled code; a warm start hits."
)
COMPILE_IN_PROGRESS = gauge("torchobs.compile.in_progress", "").described("1 while torch.compile is compiling in any thread.")

# --- checkpoints --------------------------------------------------------------------------------------------------------------
CHECKPOINTS = counter("torchobs.checkpoints", "{checkpoint}", SAVE_RESULT, quiet=0.0).described(
    "Saves by torch, safetensors, torch.distributed.checkpoint; those between two steps count once, failures each."
)
CHECKPOINT_FAILURE_STREAK = gauge("torchobs.checkpoint.failure_streak", "{checkpoint}", survives=True, quiet=0.0).described(
    "Saves that raised since the last one that succeeded."
)
CHECKPOINT_TIMESTAMP = gauge("torchobs.checkpoint.timestamp", "s", survives=True).described(
    "Unix time at which the last checkpoint was complete."
)
CHECKPOINT_DURATION = gauge("torchobs.checkpoint.duration", "s", survives=True).described(
    "Duration of the last checkpoint until it was complete."
)
CHECKPOINT_SIZE = gauge("torchobs.checkpoint.size", "By", survives=True).described(
    "Bytes that this rank wrote for the last checkpoint."
)

# --- distributed training -----------------------------------------------------------------------------------------------------
DISTRIBUTED_WORLD_SIZE = gauge("torchobs.distributed.world_size", "{rank}").described("Ranks in the default process group.")
DISTRIBUTED_COPIES = gauge("torchobs.distributed.copies", "{rank}", quiet=1.0).described(
    "Ranks given the same batch: the mesh's tensor-, pipeline- and context-parallel sizes multiplied."
)
DISTRIBUTED_COORDINATES = gauge(
    "torchobs.distributed.coordinates",
    "",
    Attribute("dp", "place in data parallelism"),
    Attribute("tp", "tensor"),
    Attribute("pp", "pipeline stage"),
    Attribute("cp", "context"),
    Attribute("ep", "expert"),
    survives=True,
).described("Constant 1; labels: the rank's place on each axis of parallelism, for joins.")
DISTRIBUTED_INFO = gauge(
    "torchobs.distributed.info",
    "",
    Attribute("backend", "e.g. nccl"),
    Attribute("parallelism", "ddp, fsdp1, fsdp2, hsdp, tensor, join; by +"),
    Attribute("mesh", "e.g. dp=4,tp=2"),
    survives=True,
).described("Constant 1; labels: how the training is spread over ranks.")
DDP_TIME = gauge("torchobs.ddp.time", "s", DDP_PART).described(
    "Time in DistributedDataParallel's last timed iteration: the first ten, then one in 100."
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
    Attribute("comm_hook", "communication hook, if any"),
    survives=True,
).described("Constant 1; labels: the settings of DistributedDataParallel.")
COLLECTIVE_ENQUEUED = gauge("torchobs.collective.enqueued", "", PROCESS_GROUP_BACKEND, PROCESS_GROUP, survives=True).described(
    "Number of the last collective that the rank called; in a hang the missing rank's is lowest."
)
COLLECTIVE_COMPLETED = gauge("torchobs.collective.completed", "", PROCESS_GROUP_BACKEND, PROCESS_GROUP).described(
    "Number of the last collective that came back on the rank; absent while training moves."
)
COLLECTIVE_PENDING_AGE = gauge(
    "torchobs.collective.pending.age", "s", PROCESS_GROUP_BACKEND, PROCESS_GROUP, COLLECTIVE_OPERATION
).described("Age of the rank's oldest open collective, once all is still for ten seconds; 0: none.")
COLLECTIVE_PENDING_SIZE = gauge(
    "torchobs.collective.pending.size", "By", PROCESS_GROUP_BACKEND, PROCESS_GROUP, COLLECTIVE_OPERATION
).described("Size of that collective's input on this rank.")
COLLECTIVE_INPUT = counter(
    "torchobs.collective.input", "By", Attribute("operation", "which collective", COLLECTIVE_OPERATIONS[1:])
).described("Size of the inputs to collectives that torch's flight recorder still held. From level advanced on.")
COLLECTIVE_SIZE = histogram("torchobs.collective.size", "By", SIZE_BOUNDS).described(
    "Size of each collective's input. From level advanced on."
)
COLLECTIVE_DURATION = histogram("torchobs.collective.duration", "s", COLLECTIVE_SECONDS_BOUNDS).described(
    "Duration of collectives on the device (NCCL, TORCH_NCCL_ENABLE_TIMING=1). From level advanced on."
)

# --- ranks, as the exporter sees them -----------------------------------------------------------------------------------------
RANK_STATE_SET = gauge("torchobs.rank.state", "", RANK_STATE, survives=True).described("1 for the state that the rank is in.")
RANK_UP = gauge("torchobs.rank.up", "", survives=True).described("1 while the rank's process lives.")
RANK_HEARTBEAT_TIMESTAMP = gauge("torchobs.rank.heartbeat.timestamp", "s", survives=True).described(
    "Unix time of the rank's last heartbeat."
)
RANK_PROGRESS_AGE = gauge("torchobs.rank.progress.age", "s").described(
    "Time since the last step, or since the start before the first."
)
RANK_START_TIME = gauge("torchobs.rank.start_time", "s", survives=True).described(
    "Unix time at which torchobs started in the rank."
)
RANK_RESTARTS = counter("torchobs.rank.restarts", "{restart}").described("Times the launcher has restarted the rank.")
RANK_SLOWDOWN = gauge("torchobs.rank.slowdown", "1").described(
    "Step time over what it would be if peers on this machine did not wait for the rank."
)
RANK_EXCESS = gauge("torchobs.rank.excess", "s", LATE_PHASE).described(
    "Time per step that peers on this machine wait for the rank, by the phase in which it is late."
)
RANK_BEHIND = gauge("torchobs.rank.behind", "{step}").described(
    "Steps behind the furthest rank of its replica group on this machine."
)
RANK_STALL_POSITION = gauge("torchobs.rank.stall.position", "{step}", STALL_PHASE).described(
    "While a peer hangs: steps done, and a fifth per phase of the next. The lowest are likely waited for."
)
RUN_LOCAL_RANKS = gauge("torchobs.run.local_ranks", "{rank}").described("Ranks of the run that live on this machine.")
RUN_MISSING_RANKS = gauge("torchobs.run.missing_ranks", "{rank}").described(
    "Ranks started on this machine that the exporter does not see."
)
RUN_STEP_SPREAD = gauge("torchobs.run.step_spread", "{step}").described(
    "Steps between first and last rank here, the most of any replica group."
)
RUN_GRAD_NORM = gauge("torchobs.run.grad_norm", "").described(
    "L2 norm of the whole gradient, if all ranks are on this machine."
)
RANK_EXIT = gauge("torchobs.rank.exit", "", EXIT_REASON, survives=True).described("1 for the way in which the rank ended.")
RANK_EXCEPTION = gauge(
    "torchobs.rank.exception",
    "",
    Attribute("exception.type", "its class"),
    Attribute("message", "first line of its message, without secrets"),
    Attribute("location", "innermost file:line of the user's code"),
    survives=True,
).described("Constant 1 for the exception that ended the rank.")
PROCESS_CHILDREN = gauge("torchobs.rank.process.children", "{process}", quiet=0.0).described(
    "Descendants of the rank's process: DataLoader workers, compilers."
)
PROCESS_THREADS = gauge("torchobs.rank.process.threads", "{thread}").described("Threads of the rank's process.")
PROCESS_OPEN_FILES = gauge("torchobs.rank.process.open_fds", "{file}").described("Open file descriptors of the rank's process.")
PROCESS_MAX_FILES = gauge("torchobs.rank.process.max_fds", "{file}").described(
    "File descriptors that the rank's process may open."
)
RANK_INFO = gauge("torchobs.rank.info", "", survives=True).described("Constant 1; its labels describe the rank.")
WORLD_SIZE = gauge("torchobs.world_size", "{rank}", survives=True).described("Ranks in the run, as its launcher says.")
