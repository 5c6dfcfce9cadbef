"""Write jobs.json for sweep.py: named experiments, each a small table of what differs.

python benchmarks/algorithms/jobs.py algorithms windows --out jobs.json
python benchmarks/algorithms/jobs.py collapse --without OUT/summary.jsonl --out rest.json

A job's name is ARM.seedN. Experiments may share an arm: its jobs are made once. --without leaves
out the jobs that an earlier sweep has finished.
"""

import argparse
import ast
import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SEEDS = (42, 1, 2)
COMMON = {
    "trackers": "none",
    "eval.num_samples": 0,
    "eval.batch_size": 128,
    "eval_freq": 10,
    "sample.batch_size": 96,
    "save_freq": 1000,
    "reward.num_workers": 2,
}
QUICKSTART = "config/grpo.py:tiny_ocr"
GUARD_CPS_PRESET = "config/grpo_guard.py:tiny_guard_cps"
SFT_PRESET, ONLINE_SFT_PRESET = "config/sft.py:tiny_sft", "config/sft.py:tiny_online_sft"
ALL_STEPS = {"sample.sde_window_size": 0, "sample.sde_window_range": "(0,0)"}
FLOW_SDE = {"sample.sde_type": "flow_sde", "sample.noise_level": 0.7}
DANCE_SDE = {"sample.sde_type": "dance_sde", "sample.noise_level": 0.8}
GUIDED = {"sample.guidance_scale": 3.0, "eval.guidance_scale": 3.0}
WATCHED = (
    "gold.sign_distance:SignDistance:0,gold.background:Background:0,gold.second_ocr:SecondOcr:0"
)
COMMON["reward_fn"] = f"ocr:1,{WATCHED}"
TWO_REWARDS = {"reward_fn": f"ocr:1,jpeg_compressibility:0.2,{WATCHED}"}


class Arm:
    """One setting: a name, a preset, what differs from it, and the seeds it runs with."""

    def __init__(self, name, preset=QUICKSTART, changes=None, *, seeds=SEEDS, keep=False):
        self.name, self.preset, self.changes = name, preset, changes or {}
        self.seeds, self.keep = seeds, keep

    def jobs(self, forced: dict) -> list[dict]:
        """Return a job a seed; `forced` settings win over those of the arm."""
        made = []
        for seed in self.seeds:
            fields = {**COMMON, "seed": seed, **self.changes, **forced}
            arguments = ["--config", self.preset]
            arguments += [f"--config.{key}={value}" for key, value in fields.items()]
            made.append(
                {
                    "name": f"{self.name}.seed{seed}",
                    "arm": self.name,
                    "seed": seed,
                    "arguments": arguments,
                    "keep": self.keep,
                }
            )
        return made


def tiny_presets() -> dict[str, str]:
    """Return {arm: FILE:PRESET} of every tiny preset that learns from the ocr reward."""
    found = {}
    for path in sorted((ROOT / "config").glob("*.py")):
        if path.stem in ("base", "models", "tasks"):
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("tiny_"):
                preset = f"config/{path.name}:{node.name}"
                arm = "quickstart" if preset == QUICKSTART else node.name.removeprefix("tiny_")
                if found.setdefault(arm, preset) != preset:
                    raise ValueError(f"two presets are called {node.name}")
    del found["jpeg"]
    return found


def algorithms() -> list[Arm]:
    """Every tiny preset, with its own rewards."""
    changes = {"gdpo": TWO_REWARDS, "mr": TWO_REWARDS}
    return [Arm(name, preset, changes.get(name)) for name, preset in tiny_presets().items()]


def windows() -> list[Arm]:
    """How many steps are stochastic and trained; the quickstart's window is 2."""
    return [
        Arm("quickstart"),
        Arm("window_1", changes={"sample.sde_window_size": 1}),
        Arm("window_all", changes=ALL_STEPS),
    ]


def samplers() -> list[Arm]:
    """The three stochastic samplers in one window; the quickstart's is cps 0.8."""
    return [
        Arm("quickstart"),
        Arm("flow_sde_window", changes=FLOW_SDE),
        Arm("dance_0.8", changes=DANCE_SDE),
    ]


def _rate_and_clip(rate: float, clip: float, changes: dict | None = None, name: str = "") -> Arm:
    changes = {"train.learning_rate": rate, "train.clip_range": clip, **(changes or {})}
    name = f"{name}lr_{rate:.0e}_clip_{clip:.0e}".replace("e-0", "e-")
    return Arm(name, changes=changes, seeds=SEEDS[:1])


def collapse() -> list[Arm]:
    """Learning rates, clip ranges, guidance and small groups, one seed each."""
    pairs = [(3e-4, 1e-4), (4e-3, 1e-4), (4e-3, 1e-3)]
    pairs += [(rate, clip) for rate in (1e-3, 2e-3) for clip in (1e-5, 1e-4, 1e-3, 1e-2)]
    small = {"sample.group_size": 4, "sample.groups_per_epoch": 48}
    return [
        *(_rate_and_clip(*pair) for pair in pairs if pair != (1e-3, 1e-4)),
        Arm("cfg_3_window", changes=GUIDED, seeds=SEEDS[:1]),
        Arm("cfg_3_window_all", changes={**GUIDED, **ALL_STEPS}, seeds=SEEDS[:1]),
        _rate_and_clip(4e-3, 1e-3, GUIDED, "cfg_3_window_"),
        Arm("group_4", changes=small, seeds=SEEDS[:1]),
        Arm("online_sft_8", ONLINE_SFT_PRESET, {"train.old_update_freq": 8}, seeds=SEEDS[:1]),
        Arm("sft_kl_100", SFT_PRESET, {"train.kl_coef": 100.0}, seeds=SEEDS[:1]),
    ]


def cfg() -> list[Arm]:
    """Guidance: the base with it is the evaluation before training of the second arm."""
    return [Arm("quickstart"), Arm("quickstart_at_3", changes={"eval.guidance_scale": 3.0})]


def overopt() -> list[Arm]:
    """Three times as long: the proxy beside what it stands for, GRPO beside GRPO-Guard.

    The Guard preset normalises advantages by the group; `group_std` is GRPO with that alone.
    """
    long = {"num_epochs": 120}
    group_std = {"sample.global_std": False}
    arms = [
        Arm("long_grpo_1e-3", QUICKSTART, long, keep=True),
        Arm("long_group_std_1e-3", QUICKSTART, {**long, **group_std}, keep=True),
        Arm("long_guard_1e-3", GUARD_CPS_PRESET, long, keep=True),
    ]
    for rate, name in ((3e-4, "3e-4"), (2e-3, "2e-3")):
        changes = {**long, "train.learning_rate": rate}
        arms += [
            Arm(f"long_grpo_{name}", QUICKSTART, changes, seeds=SEEDS[:1]),
            Arm(f"long_guard_{name}", GUARD_CPS_PRESET, changes, seeds=SEEDS[:1]),
        ]
    return arms


EXPERIMENTS = {
    function.__name__: function
    for function in (algorithms, windows, samplers, collapse, cfg, overopt)
}


def build(names: list[str], forced: dict | None = None) -> list[dict]:
    """Return the jobs of experiments in order, each once; `forced` settings hold for all.

    Every arm of an experiment gets its first seed before any gets its second.

    Raises:
        ValueError: two arms of one name differ.
    """
    made: dict[str, dict] = {}
    for name in names:
        found = [job for arm in EXPERIMENTS[name]() for job in arm.jobs(forced or {})]
        for job in sorted(found, key=lambda job: SEEDS.index(job["seed"])):
            if made.setdefault(job["name"], job)["arguments"] != job["arguments"]:
                raise ValueError(f"two different jobs are called {job['name']}")
    return list(made.values())


def main() -> None:
    """Write the jobs and say how many."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("experiments", nargs="+", choices=sorted(EXPERIMENTS))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--without", type=Path, nargs="*", default=[], help="summary.jsonl files")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="for every job")
    args = parser.parse_args()
    forced = dict(item.split("=", 1) for item in args.set)
    records = [json.loads(line) for path in args.without for line in path.read_text().splitlines()]
    finished = {record["name"] for record in records if record["code"] == 0}
    finished -= {record["name"] for record in records if record["stopped"]}
    jobs = [job for job in build(args.experiments, forced) if job["name"] not in finished]
    args.out.write_text(json.dumps(jobs, indent=1) + "\n")
    print(f"{len(jobs)} jobs: {', '.join(job['name'] for job in jobs)}")


if __name__ == "__main__":
    main()
