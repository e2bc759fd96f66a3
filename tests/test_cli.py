"""The command as a user meets it: output, files, mistakes."""

from __future__ import annotations

import json
import math
import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from command import DOCS, documented, fails, fastadv, keys_of
from rollout_files import sample, samples, write_dump, write_policy, write_verl
from safetensors.torch import save_file

from fastadv.replay.pipeline import Agreement, ReplayOptions
from fastadv.replay.pipeline import replay as replay_dumps
from fastadv.replay.predictions import Prediction
from fastadv.replay.report import Table, headline, remarks, warnings
from fastadv.replay.terminal import widths

EXAMPLE = Path(__file__).parent.parent / "examples" / "frozen_lake"
MILES = Path(__file__).parent / "data" / "miles_dump_example.pt"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, dict[str, Any]]:
    """Terminal, page and numbers of the committed example."""
    out = tmp_path_factory.mktemp("report") / "made" / "here"
    run = fastadv("replay", EXAMPLE / "rollouts.pt", "--policy", EXAMPLE / "policy", "--out", out)
    assert run.returncode == 0, run.stderr
    return run.stdout, (out / "report.html").read_text(), json.loads((out / "report.json").read_text())


def test_the_example_shows_every_table(report: tuple[str, str, dict[str, Any]]) -> None:
    terminal, page, _ = report
    titles = [
        "Dumps", "Outcome census", "Prompts", "Arms", "Effective weight", "Gradients at the checkpoint",
        "Gradients by turn", "Gradients by difficulty", "Predictions",
    ]  # fmt: skip
    for title in titles:
        assert f"\n{title}" in terminal
        assert f"<h2>{title}</h2>" in page
    assert "the policy is the one that sampled" in terminal


def test_the_examples_numbers(report: tuple[str, str, dict[str, Any]]) -> None:
    *_, numbers = report
    census, total = numbers["census"], sum(numbers["census"].values())
    assert total >= 16 * 8
    assert min(census["SOLVED"], census["FAILED"], census["BUDGET"]) > 0
    assert 0.15 <= census["BUDGET"] / total <= 0.60
    arms = {arm["name"]: arm for arm in numbers["arms"]}
    assert list(arms) == ["a", "b", "c", "d0.3", "d0.6", "d1", "e"]
    assert arms["a"]["subsidy"] == arms["e"]["subsidy"] == 0
    assert 0 < arms["b"]["subsidy"] < arms["c"]["subsidy"]  # survivors amplify
    whole = {row["arm"]: row for row in numbers["gradients"] if row["scope"] == "all"}
    assert whole["a"]["cosine"] == pytest.approx(1)
    assert whole["b"]["cosine"] == whole["d1"]["cosine"] < 1
    scopes = {row["scope"] for row in numbers["gradients"]}
    assert {"turn 1", "turns 3-4", "hard (< 1/3)", "easy (> 2/3)"} <= scopes
    assert [p["name"] for p in numbers["predictions"]] == ["P1", "P2", "P4", "P5", "P7"]
    p1, *_, p7 = numbers["predictions"]
    assert (p1["name"], p1["verdict"]) == ("P1", "supported")
    assert max(p1["statistic"].values()) < 1e-4
    assert p7["name"] == "P7"
    assert p7["interval"][0] <= p7["statistic"]["variance drop"] <= p7["interval"][1]
    assert numbers["agreement"]["mean_difference"] < 1e-3
    assert re.fullmatch("[0-9a-f]{64}", numbers["files"][0]["statistics_hash"])


def test_the_example_shows_both_estimators(report: tuple[str, str, dict[str, Any]]) -> None:
    terminal, page, numbers = report
    projections = numbers["projections"]
    rows = {(row["arm"], row["scope"], row["estimator"]): row["comparison"] for row in projections["rows"]}
    flat = {(row["arm"], row["scope"]): row for row in numbers["gradients"]}
    for (arm, scope), row in flat.items():
        assert rows[arm, scope, "plug-in"]["cosine"]["value"] == row["cosine"]
        assert (arm, scope, "u-statistic") in rows
    assert numbers["gradients_by"] == "gram"
    assert numbers["covered"] == numbers["parameters"]
    assert projections["noise_floor"] == numbers["noise_floor"]
    assert projections["prompts"] == 32
    b, signal = rows["b", "all", "plug-in"], projections["signal"]
    assert b["alignment"]["low"] > 0  # the same rollouts on both sides
    alignment = rows["b", "all", "u-statistic"]["alignment"]
    assert alignment["low"] < 0 < alignment["high"]  # 32 prompts show nothing
    assert signal["low"] < 0 < signal["high"]
    for text in (" ".join(terminal.split()), " ".join(page.split())):
        assert "by a bootstrap over 32 prompts" in text
        assert f"{alignment['low']:.2f} to {alignment['high']:.2f}" in text
        assert "U-statistic" in text
        assert "do not tell arm (a)&#39;s gradient" in text or "do not tell arm (a)'s gradient" in text
        assert "gradients of 84,608 of 84,608 parameters (100.0%), by segment Gram" in text
    assert "What arms add, along the cap" in page


def test_the_page_stands_alone(report: tuple[str, str, dict[str, Any]]) -> None:
    _, page, _ = report
    assert page.count("<svg") >= 4
    assert not re.search(r"<script|<link|<img|<iframe|\son\w+=", page)
    loaded = [url for url in re.findall(r'(?:src|href)\s*=\s*"([^"]*)"', page) if not url.startswith("#")]
    assert loaded == []
    assert "url(http" not in page


def test_every_key_of_the_numbers_is_documented(report: tuple[str, str, dict[str, Any]]) -> None:
    *_, numbers = report
    page, named = (DOCS / "report_json.md").read_text(), documented("report_json.md")
    read = {"solved_above", "reward_key", "trust"}
    statistics = {name for prediction in numbers["predictions"] for name in prediction["statistic"]}
    assert keys_of(numbers, frozenset(("SOLVED", "FAILED", "BUDGET", "INFRA"))) - statistics - read == named
    assert all(f"`{name}`" in page for name in (*read, *statistics, *(row["scope"] for row in numbers["gradients"])))
    assert f"`version` is `{numbers['version']}`" in " ".join(page.split())
    (first, *_) = numbers["reward_by_turn"]
    assert first["turn"] == 1
    assert first["rollouts"] == sum(numbers["census"].values())
    assert numbers["prompts"][0]["counts"].keys() == numbers["census"].keys()


def test_the_report_says_what_its_numbers_mean(report: tuple[str, str, dict[str, Any]]) -> None:
    terminal, page, numbers = report
    shown, written = " ".join(terminal.split()), " ".join(page.split())
    for text in (shown, written):
        assert "P1 supported: the pipeline passes its self-check" in text
        assert "P7 falsified: the turn-reached baseline cuts the mean square advantage per token by 1.3%" in text
        assert f"have cosine {numbers['noise_floor']:.3f}, and 1 would be no noise" in text
        assert "about 1 - (G / (G - 1))², -0.31 for groups of 8" in text
        assert text.count("how far g - g_a points towards running into the cap") == 1
    assert "docs/report_json.md" in page
    top = shown[: shown.index("Dumps")]
    assert "mostly noise: they describe these rollouts, not the policy" in top
    assert "Written before" not in shown


def row_of(drop: float, **changes: Any) -> Prediction:
    given = {"name": "P7", "claim": "", "statistic": {"variance drop": drop}, "threshold": "", "interval": None}
    return Prediction(**{**given, "verdict": "supported", "detail": "why", **changes})


def test_what_a_verdict_means(tmp_path: Path) -> None:
    result = replay_dumps([write_dump(tmp_path / "dump.pt", samples(4, 4))], None, ReplayOptions())
    for prediction, meaning in (
        (
            row_of(0.25),
            "P7 supported: the turn-reached baseline cuts the mean square advantage per token by 25.0%; 20%",
        ),
        (row_of(-0.05, verdict="falsified"), "baseline adds 5.0% to the mean square advantage per token; 20% or more"),
        (row_of(0.15, interval=(0.1, 0.2)), r"by 15.0% (95 % interval 10.0% to 20.0%); 20% or more was predicted."),
        (row_of(0, verdict="no data"), "P7 no data: why."),
        (row_of(0, name="P1", verdict="falsified"), "P1 falsified: the pipeline fails its self-check: do not rely on"),
    ):
        assert meaning in headline(replace(result, predictions=[prediction]))
    assert headline(replace(result, predictions=[])) == "Census only: no arm was computed."


def test_warnings_come_for_noise_and_another_policy(tmp_path: Path) -> None:
    result = replay_dumps([write_dump(tmp_path / "dump.pt", samples(4, 4))], None, ReplayOptions())
    assert warnings(result) == []
    for floor, warned in ((-0.4, True), (0.33, True), (0.34, False), (math.nan, False)):
        assert bool(warnings(replace(result, noise_floor=floor))) == warned
    for gap, warned in ((0.001, False), (0.5, True), (math.nan, True)):
        changed = replace(result, agreement=Agreement(7, gap, gap))
        assert bool(warnings(changed)) == warned
        assert any("is the one that sampled" in remark for remark in remarks(changed)) != warned


def test_one_of_a_thing_is_not_several(tmp_path: Path) -> None:
    run = fastadv("replay", write_dump(tmp_path / "dump.pt", samples(1, 1)), "--out", tmp_path / "out")
    assert run.returncode == 0, run.stderr
    page = (tmp_path / "out" / "report.html").read_text()
    assert "<h1>Replay of 1 rollout</h1>" in page
    for text in (run.stdout, page):
        assert not re.search(r"(?<![\d.,])1 (prompts|rollouts|samples|groups|tokens|weights)", text)


def test_an_arm_that_keeps_nothing_has_no_factor(tmp_path: Path) -> None:
    entries = [{**entry, "status": "truncated", "reward": 0.0} for entry in samples(2, 3)]
    run = fastadv("replay", write_dump(tmp_path / "dump.pt", entries), "--out", tmp_path / "out")
    assert run.returncode == 0, run.stderr
    assert re.search(r"^b +0\.0% +0\.0% +– +– *$", run.stdout, re.MULTILINE)
    assert "–x" not in run.stdout
    assert "nan" not in run.stdout


@pytest.mark.parametrize("width", [80, 100, 200])
def test_columns_keep_their_words(report: tuple[str, str, dict[str, Any]], width: int) -> None:
    columns = ["scope", "arm", "cosine", "norm ratio", "|difference|", "on grad P(cap)", "its cosine", "slope"]
    rows = [["hard (< 1/3)", "d0.3", "-0.9772", "0.959", "-0.213", "-0.109", "-0.286", "-0.044"]] * 2
    found = widths(Table("", "", columns, rows), width)
    assert sum(found) + 2 * (len(found) - 1) <= width
    for column, cell, size in zip(columns, rows[0], found, strict=True):
        assert size >= max(len(cell), *(len(word) for word in column.split()))
    natural = [max(len(column), len(cell)) for column, cell in zip(columns, rows[0], strict=True)]
    assert (found == natural) == (width >= 100)
    assert widths(Table("", "", ["a"], [["x" * 500]]), width) == [width]


def test_the_terminal_gets_no_control_character(tmp_path: Path) -> None:
    """Whatever a file and what is in it are called."""
    attack = "\x1b]0;pwn\x07\x1b[31m\u202e\u2028\x9b"
    entries = [{**sample(random.Random(i), i // 2, i), "prompt": attack, "group_index": attack} for i in range(4)]
    odd = tmp_path / f"folder{attack}"
    odd.mkdir()
    dump = write_dump(odd / f"{attack}dump.pt", entries)
    other = write_dump(odd / f"{attack}other.pt", [{**entries[0], "index": 7, "loss_mask": None}])
    runs = [
        fastadv("replay", dump, other, "--out", odd / "out"),
        fastadv("convert", dump, odd / f"{attack}.safetensors"),
        fastadv("replay", odd / f"absent{attack}.pt", "--out", odd / "2"),
        fastadv("replay", dump, "--out", odd / "out"),  # there already
        fastadv("replay", dump, "--policy", odd, "--out", odd / "3"),
        fastadv("convert", dump, dump),
        fastadv("replay", write_dump(odd / "k.pt", [{**entries[0], "reward": {attack: 1.0}}]), "--out", odd / "4"),
        fastadv("replay", write_dump(odd / "s.pt", [{**entries[0], "status": attack}]), "--out", odd / "5"),
        fastadv("replay", dump, "--reward-key", attack, "--out", odd / "6"),
        fastadv("compare", odd / f"{attack}.safetensors"),
        fastadv("compare", dump, "--arm", attack),
    ]
    torch.save({attack: 1}, odd / "keys.pt")
    runs.append(fastadv("replay", odd / "keys.pt", "--out", odd / "7"))
    save_file({attack: torch.zeros(1)}, odd / "t.safetensors", {"format": "fastadv rollouts", "version": "1"})
    runs.append(fastadv("replay", odd / "t.safetensors", "--out", odd / "8"))
    assert [run.returncode for run in runs] == [0, 0, 2, 2, 2, 2, 2, 2, 0, 2, 2, 2, 2]
    for run in runs:
        assert run.stdout + run.stderr
        assert not set(run.stdout + run.stderr) & set(attack.replace("0;pwn", "").replace("[31m", "").replace("]", ""))


def test_the_same_run_writes_the_same_numbers(tmp_path: Path) -> None:
    for name in ("1", "2"):
        assert fastadv("replay", MILES, "--out", tmp_path / name).returncode == 0
    assert (tmp_path / "1" / "report.json").read_text() == (tmp_path / "2" / "report.json").read_text()
    assert (tmp_path / "1" / "report.html").read_text() == (tmp_path / "2" / "report.html").read_text()


def test_untrusted_text_is_escaped(tmp_path: Path) -> None:
    attack = "<script>alert(1)</script> [red]not markup[/red] \x1b[31mansi {{ 7 * 7 }}"
    entries = [{**sample(random.Random(i), i // 2, i), "prompt": attack} for i in range(8)]
    name = "<b>dump.pt"
    run = fastadv("replay", write_dump(tmp_path / name, entries), "--out", tmp_path / "out")
    assert run.returncode == 0, run.stderr
    assert "\x1b" not in run.stdout
    assert run.stderr == ""
    assert not run.stdout.startswith("\n")
    assert "[red]not markup[/red]" in run.stdout
    page = (tmp_path / "out" / "report.html").read_text()
    assert "<script>" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "{{ 7 * 7 }}" in page
    assert "<b>dump" not in page
    assert "\x1b" not in page


def test_a_verl_log_gets_a_census_and_a_reason(tmp_path: Path) -> None:
    lines = [{"input": f"q{i // 4}", "output": "x", "gts": "y", "score": float(i % 2), "step": 1} for i in range(8)]
    log = write_verl(tmp_path / "1.jsonl", lines)
    run = fastadv("replay", log, "--out", tmp_path / "out", "--policy", EXAMPLE / "policy")
    assert run.returncode == 0, run.stderr
    assert "arms and gradients refused: verl's rollout log carries text and scores only" in run.stdout
    assert "Outcome census" in run.stdout
    assert "Gradients" not in run.stdout


def test_options_reach_the_computation(tmp_path: Path) -> None:
    entries = samples(6, 4)
    for entry in entries:
        if entry["status"] == "truncated":
            entry["reward"] = -1.0
    dump, policy = write_dump(tmp_path / "dump.pt", entries), write_policy(tmp_path / "policy")

    def numbers(*options: Any) -> dict[str, Any]:
        run = fastadv(
            "replay", dump, "--policy", policy, "--out", tmp_path / "out", "--overwrite", "--p1-prompts", 1,
            "--no-buckets", *options,
        )  # fmt: skip
        assert run.returncode == 0, run.stderr
        return json.loads((tmp_path / "out" / "report.json").read_text())

    plain = numbers()
    assert any("was set to 0 (--cap-reward logged" in note for note in plain["files"][0]["notes"])
    assert {row["scope"] for row in plain["gradients"]} == {"all"}
    by_arm = {row["name"]: row for row in plain["arms"]}
    logged = {row["name"]: row for row in numbers("--cap-reward", "logged")["arms"]}
    assert logged["a"]["baseline"] < by_arm["a"]["baseline"]
    mean = {row["name"]: row for row in numbers("--baseline", "mean")["arms"]}
    assert mean["a"]["second_moment"] < by_arm["a"]["second_moment"]
    assert mean["e"]["second_moment"] == by_arm["e"]["second_moment"]
    kappa = {row["name"]: row for row in numbers("--kappa", 50)["arms"]}
    assert kappa["e"]["second_moment"] != by_arm["e"]["second_moment"]
    assert numbers("--solved-above", 2)["census"]["SOLVED"] == 0
    double = numbers("--dtype", "float64", "--temperature", 1.3, "--loss", "ppo", "--seed", 4)
    assert double["options"]["loss"] == "ppo"
    assert double["gradients"][1]["cosine"] != plain["gradients"][1]["cosine"]


def test_mistakes_are_messages(tmp_path: Path) -> None:
    dump, out = write_dump(tmp_path / "dump.pt", samples(2, 2)), tmp_path / "out"
    torch.save({"model": torch.zeros(2)}, tmp_path / "weights.pt")
    fails("replay", tmp_path / "absent.pt", "--out", out, message="absent.pt does not exist")
    fails("replay", tmp_path / "weights.pt", "--out", out, message="is no rollout dump: it holds model")
    fails("replay", dump, "--out", dump, message="is a file; name a folder")
    fails("replay", dump, "--out", out, "--policy", tmp_path, message="is no policy: it has no config.json")
    fails("replay", dump, "--out", out, "--device", "gpu", message="--device is 'gpu'; it must be cpu, cuda, or cuda:0")
    fails(
        "replay", MILES, "--out", out, "--policy", EXAMPLE / "policy", "--attention", "flash",
        message="--attention flash: segment_gram: attention 'flash' cannot run: the model is on cpu",
    )  # fmt: skip
    fails(
        "replay", dump, "--out", out, "--temperature", 0, message="--temperature is 0.0; it must be finite and above 0"
    )
    fails("replay", dump, "--out", out, "--kappa", -1, message="kappa")
    fails("replay", dump, message="--out")
    fails("replay", MILES, "--out", out, "--policy", EXAMPLE / "policy", message="they come from another tokenizer")
    fails("convert", dump, dump, message="exists already")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    fails("convert", dump, tmp_path / "link", message="link exists already")
    fails("convert", tmp_path, tmp_path / "all.safetensors", message="holds 2 dumps; convert takes one at a time")
    assert not out.exists()


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "report.html").write_text("mine")
    fails("replay", MILES, "--out", out, message="holds report.html already; --overwrite replaces them")
    assert (out / "report.html").read_text() == "mine"
    assert not (out / "report.json").exists()
    (out / "notes.txt").write_text("kept")
    assert fastadv("replay", MILES, "--out", out, "--overwrite").returncode == 0
    assert (out / "notes.txt").read_text() == "kept"
    assert "fastadv replay" in (out / "report.html").read_text()


def test_convert_and_replay_give_the_same(tmp_path: Path) -> None:
    converted = tmp_path / "rollouts.safetensors"
    assert fastadv("convert", MILES, converted).returncode == 0
    for dump, name in ((MILES, "1"), (converted, "2")):
        assert fastadv("replay", dump, "--out", tmp_path / name).returncode == 0
    first, second = (json.loads((tmp_path / name / "report.json").read_text()) for name in ("1", "2"))
    assert first["arms"] == second["arms"]
    assert first["files"][0]["statistics_hash"] == second["files"][0]["statistics_hash"]


def test_a_folder_with_one_dump_is_converted(tmp_path: Path) -> None:
    (tmp_path / "dumps").mkdir()
    write_dump(tmp_path / "dumps" / "1.pt", samples(1, 1))
    run = fastadv("convert", tmp_path / "dumps", tmp_path / "out.safetensors")
    assert run.stdout == f"wrote 1 rollout to {tmp_path / 'out.safetensors'}\n"


def test_a_mistake_in_a_process_of_its_own(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fastadv", "replay", str(tmp_path / "absent.pt"), "--out", str(tmp_path / "out")]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert run.stderr.startswith("error: ")
    assert "Traceback" not in run.stderr
    assert run.stdout == ""


def test_help_says_what_a_newcomer_needs() -> None:
    help_text = fastadv("replay", "--help").stdout
    for words in (
        "docs/report_json.md",
        "Miles",
        "verl",
        "--policy",
        "--trust-dump",
        "turn-reached",
        "Example: fastadv replay",
    ):
        assert words in help_text
    assert "replay" in fastadv("--help").stdout
    assert "cpu" in fastadv("backends").stdout
