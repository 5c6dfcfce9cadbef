"""The command line of every train script: flags, checks, one clear line for a user's mistake."""

import contextlib
import difflib
import logging
import os
import re
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from absl import flags
from ml_collections import ConfigDict, config_flags

from flow_grpo import registry
from flow_grpo.processes import accelerator_of_launch, check_processes, say_mistake

logger = logging.getLogger("flow_grpo")

USER_ERRORS = (ValueError, OSError, FloatingPointError)  # what a user can cause; one line, no trace
PRINT_CONFIG, DRY_RUN = "--print_config", "--dry_run"
OVERRIDES = ("--config.", "--noconfig.")
HELP = f"""\
usage: SCRIPT --config FILE.py:PRESET [--config.KEY=VALUE ...] [{PRINT_CONFIG}] [{DRY_RUN}]

  --config FILE.py:PRESET        a preset, such as config/grpo.py:tiny_ocr
  --config.KEY=VALUE             override any key, such as --config.train.learning_rate=1e-4
  --config.reward_fn=A:W,B:W     rewards and weights, such as ocr:0.8,jpeg_compressibility:0.2
  {PRINT_CONFIG}                 print every key and its value, and exit
  {DRY_RUN}                      check everything that needs no model, print the plan, and exit
"""


def run(adapter) -> None:
    """Train `adapter`'s model family as the command line says; exit 0, or 1 after an error line."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr, force=True)
    for noisy in ("httpx", "httpx2", "absl", "accelerate", "diffusers"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    if int(os.environ.get("RANK", 0)) != 0:
        logger.setLevel(logging.ERROR)
    try:
        code = _run(adapter, sys.argv)
    except USER_ERRORS as error:
        say_mistake(f"error: {' '.join(str(error).split()) or type(error).__name__}")
        code = 1
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; the same command resumes from the last checkpoint\n")
        code = 130
    sys.exit(code)


def parse(argv: Sequence[str]) -> ConfigDict:
    """Return the configuration that `--config` and `--config.KEY=VALUE` make, locked.

    Raises:
        ValueError: an unknown file, preset, key or flag, or a value of the wrong type.
    """
    argv = [_reward_literal(argument) for argument in argv]
    config = _flag(flags.FlagValues(), [a for a in argv if not a.startswith(OVERRIDES)])
    known = _keys(config.to_dict())
    overrides = {}  # of a key that is given twice the last counts, for tuples too
    for argument in argv:
        if argument.startswith(OVERRIDES):
            key = _key(argument)
            if key not in known:
                raise ValueError(_unknown_key(key, known))
            overrides[key] = _tuple_literal(argument, known[key])
    rest = [argument for argument in argv if not argument.startswith(OVERRIDES)]
    return _flag(flags.FlagValues(), [*rest, *overrides.values()])


def overridden(argv: Sequence[str]) -> set[str]:
    """Return the keys that `--config.KEY=VALUE` sets beside the preset."""
    return {_key(argument) for argument in argv if argument.startswith(OVERRIDES)}


def _key(argument: str) -> str:
    """Return the key of `--config.KEY=VALUE`."""
    return argument.partition("config.")[2].partition("=")[0]


def _unknown_key(key: str, known: dict[str, object]) -> str:
    """Name the nearest keys, and what the key's section holds."""
    nearest = difflib.get_close_matches(key, known, n=3, cutoff=0.5)
    leaf = difflib.get_close_matches(
        key.rpartition(".")[2], {k.rpartition(".")[2] for k in known}, n=1, cutoff=0.6
    )
    nearest += [k for k in sorted(known) if k.rpartition(".")[2] in leaf and k not in nearest]
    hint = f"; did you mean config.{', config.'.join(nearest[:3])}?" if nearest else ""
    return f"unknown key config.{key}{hint} ({PRINT_CONFIG} lists all)"


def _flag(values: flags.FlagValues, argv: list[str]) -> ConfigDict:
    config_flags.DEFINE_config_file(
        "config", None, "FILE.py:PRESET", flag_values=values, sys_argv=argv
    )
    try:
        rest = values(argv)
    except flags.Error as error:
        raise ValueError(_flag_error(error)) from error
    except (AttributeError, KeyError) as error:  # a locked configuration's, for a preset's typo
        raise ValueError(_preset_error(error)) from error
    if len(rest) > 1:
        raise ValueError(f"{rest[1]!r} is no flag; write --config.key=value")
    config = values["config"].value
    if config is None:
        raise ValueError("--config is missing; e.g. --config config/grpo.py:tiny_ocr")
    try:
        config.lock()
    except OSError as error:  # of the file itself, kept until now by config flags
        reason = " ".join(str(error).split()).rpartition("] ")[2]
        raise ValueError(f"--config: {reason}; e.g. config/grpo.py:tiny_ocr") from error
    return config


def _flag_error(error: Exception) -> str:
    """Return what is wrong with a flag; for a config file, what it raised, without the trace."""
    if "Error whilst parsing config file" not in str(error):
        return " ".join(str(error).split())
    while "Error whilst parsing config file" in str(error):
        error = error.__context__
    return _preset_error(error) if isinstance(error, TypeError) else str(error)


def _preset_error(error: Exception) -> str:
    """Return a preset's mistake with its place, without the list of all fields."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not {"ml_collections", "absl"} & set(Path(frame.filename).parts)
        and frame.filename != __file__
    ]
    place = f"{frames[-1].filename}:{frames[-1].lineno}: " if frames else ""
    text = " ".join(str(error.args[0] if error.args else error).replace("\\n", " ").split())
    text = re.sub(r" Other fields present: .*?(?=Did you mean|$)", " ", text)
    return place + text.strip()


def _run(adapter, argv: Sequence[str]) -> int:
    if {"-h", "--help", "--helpshort", "--helpfull"} & set(argv):
        sys.stdout.write(HELP)
        return 0
    actions = [a for a in argv if a in (PRINT_CONFIG, DRY_RUN)]
    argv = [a for a in argv if a not in actions]
    config, given = parse(argv), overridden(argv)
    if PRINT_CONFIG in actions:
        sys.stdout.write(_printed(config))
        return 0
    adapter.check_config(config)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # read when it is imported
    from flow_grpo import session
    from flow_grpo.prompt_sets import usable_prompts

    if DRY_RUN in actions:
        world_size = int(os.environ.get("WORLD_SIZE", 1))
        check_processes(world_size)
        plan = session.check_config(config, world_size, given, adapter)
        for split in ("train", "test"):
            usable_prompts(adapter, config, split)
        if int(os.environ.get("RANK", 0)) == 0:
            sys.stdout.write(_plan(config, plan))
        return 0
    accelerator = accelerator_of_launch(config.mixed_precision)
    check_processes(accelerator.num_processes)
    return _train(adapter, config, accelerator, given)


def _train(adapter, config: ConfigDict, accelerator, given: set[str]) -> int:
    from flow_grpo import session
    from flow_grpo.run_folder import RunFolder

    plan = session.check_config(config, accelerator.num_processes, given, adapter)
    folder = session.main_process(accelerator, lambda: RunFolder(config))
    try:
        if session.on_all(accelerator, lambda: _is_finished(folder, config)):
            epochs = config.num_epochs if folder is None else folder.summary().get("epochs")
            logger.info("%s has finished its %s epochs", config.run_name, epochs)
        else:
            logger.info("%s", _plan(config, plan).rstrip())
            _build_and_train(adapter, config, accelerator, plan, folder)
        if folder is not None:
            sys.stdout.write(_result(folder))
    except USER_ERRORS as error:
        if folder is None:
            raise
        with contextlib.suppress(OSError):
            (folder.path / "error.log").write_text(traceback.format_exc())
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            raise OSError(f"{error}, while writing below {folder.path}") from error
        raise
    finally:
        if folder is not None:
            folder.close()
    accelerator.free_memory()  # DDP must not outlive its process group
    accelerator.end_training()
    return 0


def _build_and_train(adapter, config, accelerator, plan, folder) -> None:
    import torch

    from flow_grpo import session, trainer
    from flow_grpo.models.loading import quiet_libraries

    quiet_libraries()
    torch.backends.cuda.matmul.allow_tf32 = config.allow_tf32
    run = session.build(adapter, config, accelerator, plan, folder)
    policy = run.policy
    logger.info(
        "%s: %.2f M of %.2f M parameters train%s; %d train and %d held-out prompts",
        type(run.model).__name__,
        policy.num_trained / 1e6,
        policy.num_parameters / 1e6,
        f" ({len(policy.frozen)} without a gradient are frozen)" if policy.frozen else "",
        len(run.prompts),
        len(run.eval_prompts),
    )
    try:
        trainer.train(run)
    finally:
        run.rewards.close()


def _is_finished(folder, config: ConfigDict) -> bool:
    from flow_grpo import checkpoint

    if config.resume_from or folder.summary() is None:
        return False
    found = checkpoint.newest(folder.checkpoints)
    return found is not None and found[1]["epoch"] >= config.num_epochs


def _plan(config: ConfigDict, plan) -> str:
    """Return the header that a run starts with."""
    from flow_grpo.session import updates_per_epoch
    from flow_grpo.settings import reward_weights

    train = config.train
    names = ("updates_per_epoch", "num_inner_epochs", "steps_per_update")
    factors = ", ".join(f"{name} {train[name]}" for name in names)
    return (
        f"***** {config.run_name}: {config.algorithm} *****\n"
        f"  images per epoch = {plan.groups_per_epoch} groups x {plan.group_size} = "
        f"{plan.samples_per_epoch}; per rank ({plan.world_size}) {plan.samples_per_rank} "
        f"in {plan.rollout_batches} batches of {plan.batch_size}\n"
        f"  optimizer steps per epoch = {updates_per_epoch(config)} ({factors}); "
        f"epochs = {config.num_epochs}\n"
        f"  rewards = {', '.join(f'{name} ({w})' for name, w in reward_weights(config).items())}; "
        f"run folder = {os.path.join(config.logdir, config.run_name)}\n"
    )


def _result(folder) -> str:
    """Return a finished run's last lines: before, after, and where the report lies."""
    summary = folder.summary() or {}
    before, after = summary.get("eval_before") or {}, summary.get("eval_after") or {}
    names = [name for name in after if f"{name}_stderr" in after and f"{name}_stderr" in before]
    said = {(before[name], after[name]) for name in names}
    if len(names) == 2 and len(said) == 1:  # one reward of weight 1: the total says the same
        names.remove("total")
    lines = [
        f"held-out {name}: {before[name]:.4f} ± {before[name + '_stderr']:.4f} -> "
        f"{after[name]:.4f} ± {after[name + '_stderr']:.4f} ({after[name] - before[name]:+.4f})"
        for name in names
    ]
    lines.append(
        f"{summary.get('epochs')} epochs, {summary.get('images')} images, "
        f"{(summary.get('seconds') or 0) / 60:.1f} minutes"
    )
    lines.append(f"report: {folder.path / 'report.html'}")
    return "\n".join(lines) + "\n"


def _printed(config: ConfigDict) -> str:
    """Return every key and its value, a line each."""
    from flow_grpo.metrics import flatten

    flat = flatten(config.to_dict())
    width = max(len(key) for key in flat)
    return "".join(f"config.{key:<{width}} = {flat[key]!r}\n" for key in flat)


def _keys(settings: dict, prefix: str = "") -> dict[str, object]:
    """Return {dotted name: value} of all settings, sections included."""
    found = {}
    for key, value in settings.items():
        found[f"{prefix}{key}"] = value
        if isinstance(value, dict):
            found |= _keys(value, f"{prefix}{key}.")
    return found


def _tuple_literal(argument: str, default) -> str:
    """Turn --config.trackers=a,b into the tuple literal that config flags take."""
    flag, _, text = argument.partition("=")
    if not isinstance(default, tuple) or text.startswith(("(", "[")):
        return argument
    parts = [part.strip() for part in text.split(",") if part.strip()]
    numeric = default and not isinstance(default[0], str)
    items = ", ".join(part if numeric else repr(part) for part in parts)
    return f"{flag}=({items}{',' if len(parts) == 1 else ''})"


def _reward_literal(argument: str) -> str:
    """Turn --config.reward_fn=ocr:0.8,... into the dict literal that config flags take."""
    flag = "--config.reward_fn="
    if not argument.startswith(flag) or argument.startswith(flag + "{"):
        return argument
    weights = registry.parse_reward_fn(argument.removeprefix(flag))
    return flag + repr({name.replace(".", "/"): weight for name, weight in weights.items()})
