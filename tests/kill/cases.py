"""Where runs are killed. The names are those of the planted faults (`faults.point` in fp8rl, tasks)."""

# While the run is being made: nothing of that name is there after it, and `fp8rl run` is called again.
UNBORN = ("write:.run.json.copy", "write:run.json", "write:lock.json")

# The flow process, in the order in which a run reaches them; each kill is followed by a resume.
OPENING = (
    "write:[0-9]*.json",  # the first attempt's record
    "write:lock.json",
    "write:[0-9]*.json",
    "tracking:database",
    "tracking:created",
    "write:state.json",
)
PREPARING = (
    "step:prepare_data:0",
    "commit:prepare_data:0:before-record",
    "commit:prepare_data:0:committed",
    "step:warm_start:0",
    "commit:warm_start:0:before-record",
    "commit:warm_start:0:committed",
)
FIRST_WEIGHTS = (
    "step:requantize:0",
    "commit:recalibrate_kv:0:before-record",
    "commit:evaluate:0:committed",
    "commit:iteration:0:committed",
    "tracking:0:before-push",
    "tracking:0:after-push",
)


def _step(name: str, iteration: int) -> tuple[str, ...]:
    label = f"{name}:{iteration}"
    return f"step:{label}", f"commit:{label}:before-record", f"commit:{label}:committed"


# An iteration with everything: two chunks, an evaluation, a checkpoint after it.
ITERATION = (
    "step:rollout:2",
    "commit:rollout.0000:2:before-record",
    "commit:rollout.0000:2:committed",
    "commit:rollout.0001:2:before-record",
    "commit:rollout.0001:2:committed",
    "rollout:2:joined",
    "commit:rollout:2:before-record",
    "commit:rollout:2:committed",
    *_step("reward", 2),
    *_step("train", 2),
    *_step("requantize", 2),
    *_step("recalibrate_kv", 2),
    *_step("evaluate", 2),
    "commit:iteration:2:before-record",
    "commit:iteration:2:committed",
    "tracking:2:before-push",
    "tracking:2:after-push",
)
FLOW = (*OPENING, *PREPARING, *FIRST_WEIGHTS, *ITERATION)

# The actors' processes, all in one run that nobody resumes (checkpoint.every=1).
ACTORS = (
    "engine:load:0:1",
    "engine:scales:0:middle",
    "engine:evaluate:0:greedy",
    "engine:rollout:1:0:generated",
    "engine:rollout:1:1:generated",
    "learner:train:1:middle",
    "publish:1:tensors",
    "engine:load:1:0",
    "checkpoint:1:middle",
    "learner:train:2:middle",
    "publish:2:before-manifest",
    "learner:send:2:1",
    "learner:calibrate:2:middle",
    "engine:evaluate:2:sampled",
    "checkpoint:2:before-rename",
    "checkpoint:3:written",
)


def in_words(point: str) -> str:
    """When the process was killed."""
    kind, *rest = point.split(":")
    if kind == "step":
        return f"at the beginning of {rest[0]}, iteration {rest[1]}"
    if kind == "commit":
        when = {"before-record": "before its record", "committed": "right after its record"}[rest[2]]
        name = rest[0].replace("rollout.000", "rollout chunk ")
        return f"{name}, iteration {rest[1]}: {when}"
    if kind == "write":
        name = rest[0].replace("[0-9]*.json", "an attempt's record")
        return f"while writing {name}"
    if kind == "tracking":
        return "MLflow: " + {
            "database": "while its database is made",
            "created": "its run is made and not yet noted",
        }.get(rest[0], f"{rest[-1].replace('-', ' the ')} of iteration {rest[0]}")
    if kind == "rollout":
        return f"rollout, iteration {rest[0]}: chunks joined, not yet committed"
    if kind == "engine":
        what = {
            "load": "in the sync of weights {}",
            "scales": "while KV scales {} are applied",
            "evaluate": "in the evaluation of weights {}",
            "rollout": "in the middle of a rollout chunk, iteration {}",
        }[rest[0]]
        part = {"rollout": "chunk", "load": "bucket"}.get(rest[0])
        return what.format(rest[1]) + (f" ({part} {rest[2]})" if part else "")
    if kind == "learner":
        if rest[0] == "send":
            return f"in the sync of weights {rest[1]} (bucket {rest[2]})"
        what = {"train": "in the middle of train", "calibrate": "in recalibrate_kv"}[rest[0]]
        return f"{what}, iteration {rest[1]}"
    if kind == "publish":
        return f"while weights {rest[0]} are published ({rest[1].replace('-', ' the ')})"
    return f"in the checkpoint of version {rest[0]} ({rest[1].replace('-', ' the ')})"
