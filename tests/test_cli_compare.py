"""`fastadv compare` as a user meets it: what a Gram matrix in a file says of other arms."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from command import documented, fails, fastadv, keys_of
from rollout_files import samples, write_dump, write_policy

from fastadv.gradproj import SegmentGram


@pytest.fixture(scope="module")
def replayed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a replay of two small dumps."""
    folder = tmp_path_factory.mktemp("replayed")
    dumps = [write_dump(folder / f"{i}.pt", samples(4, 4, seed=i)) for i in range(2)]
    run = fastadv(
        "replay",
        *dumps,
        "--policy",
        write_policy(folder / "policy"),
        "--out",
        folder / "out",
        "--seed",
        3,
        "--kappa",
        5,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.endswith("gram.safetensors\n")
    assert "segment Gram, level turn" in run.stderr  # the plan, before the pass
    assert max(map(len, run.stderr.splitlines())) <= 80
    return folder / "out"


@pytest.mark.row(48)
def test_compare_gives_the_replays_numbers(replayed: Path, tmp_path: Path) -> None:
    """Without model and dump, over the rollouts of both dumps."""
    out = tmp_path / "arms.json"
    run = fastadv("compare", replayed / "gram.safetensors", "--seed", 3, "--kappa", 5, "--out", out)
    assert run.returncode == 0, run.stderr
    numbers, before = json.loads(out.read_text()), json.loads((replayed / "report.json").read_text())
    assert numbers["projections"] == before["projections"]
    assert [{k: v for k, v in arm.items() if k != "settings"} for arm in numbers["arms"]] == before["arms"]
    assert numbers["gram"]["rollouts"] == 32
    for text in ("Gradients at the checkpoint", "Gradients by turn", "32 rollouts, 8 prompts", f"wrote {out}"):
        assert text in run.stdout
    assert "checkpoint " + numbers["gram"]["checkpoint"][:16] in run.stdout


def test_compare_takes_arms_that_nobody_had_thought_of(replayed: Path, tmp_path: Path) -> None:
    out = tmp_path / "arms.json"
    run = fastadv(
        "compare", replayed / "gram.safetensors", "--reference", "e", "--arm", "a", "--no-buckets", "--out", out,
        "--arm", "new <b>[red]:excludes=budget+failed, fraction=0.5, baseline=mean, seed=9",
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert "new <b>[red]" in run.stdout
    numbers = json.loads(out.read_text())
    assert [arm["name"] for arm in numbers["arms"]] == ["e", "a", "new <b>[red]"]
    assert numbers["arms"][2]["settings"] == {
        "excludes": ["budget", "failed"], "fraction": 0.5, "baseline": "mean", "population": "all",
        "singleton": "zero", "kappa": 2.0, "seed": 9,
    }  # fmt: skip
    assert {row["scope"] for row in numbers["projections"]["rows"]} == {"all"}
    first = numbers["projections"]["rows"][0]
    assert (first["arm"], first["comparison"]["difference"]["value"]) == ("e", 0)
    assert keys_of(numbers, frozenset()) <= documented("gram_file.md") | documented("report_json.md")


def test_compares_mistakes_are_messages(replayed: Path, tmp_path: Path) -> None:
    gram = replayed / "gram.safetensors"
    fails("compare", tmp_path / "absent", message=r"absent cannot be read: No such file")
    fails("compare", replayed, message=r"out is a folder; name the Gram in it, such as .*out/gram\.safetensors")
    fails("compare", replayed / "report.json", message=r"report\.json is truncated or no safetensors file")
    fails("compare", gram, "--arm", "z", message="'z' is none of a, b, c, d0.3, d0.6, d1, e; describe another as NAME")
    fails("compare", gram, "--arm", "z:excludes=capped", message="'capped' is no outcome; join names with")
    fails("compare", gram, "--arm", "z:fraction=x", message="fraction is 'x', which is no number")
    fails("compare", gram, "--arm", "z:fraction=2", message="fraction is 2.0; it must be in")
    fails("compare", gram, "--arm", "z:colour=red", message="'colour=red' is no key=value of excludes, fraction")
    fails("compare", gram, "--arm", "z:baseline=median", message="baseline is 'median'")
    fails("compare", gram, "--arm", "b:excludes=budget", message="'b' is a preset .*choose another name")
    fails("compare", gram, "--arm", "half:", message="'half:' describes nothing; add key=value")
    fails("compare", gram, "--arm", ":excludes=budget", message="':excludes=budget' has no name before the colon")
    fails("compare", gram, "--arm", " : ", message="has no name before the colon; write NAME:")
    fails("compare", gram, "--arm", "x:excludes=budget,excludes=infra", message="excludes is there twice; give it once")
    fails("compare", gram, "--arm", "x:kappa=1,kappa=2", message="kappa is there twice")
    fails("compare", gram, "--arm", "z:seed=1.5", message="seed is '1.5', which is no integer")
    fails("compare", gram, "--arm", "x:kappa=1", "--arm", "x:kappa=2", message="two arms are called 'x'")
    fails("compare", gram, "--arm", "b", "--arm", "b", message="two arms are called 'b'")
    fails("compare", gram, "--arm", "a", message="two arms are called 'a'")
    fails("compare", gram, "--out", gram, "--overwrite", message="is the Gram that is asked; name another file")
    there = tmp_path / "there.json"
    there.write_text("mine")
    fails("compare", gram, "--out", there, message="exists already; --overwrite replaces it")
    fails("compare", gram, "--out", there / "x.json", message="is no folder")
    assert there.read_text() == "mine"
    assert fastadv("compare", gram, "--out", there, "--overwrite", "--arm", "b").returncode == 0
    assert json.loads(there.read_text())["format"] == "fastadv arms"


def test_what_a_gram_says_of_itself_is_text(replayed: Path, tmp_path: Path) -> None:
    attack = "\x1b]0;pwn\x07\u202e[red]\n\x9b"
    gram = SegmentGram.load(replayed / "gram.safetensors")
    replace(gram, notes=(attack,), dtype=attack, checkpoint=attack, batch=attack).save(tmp_path / "gram")
    run = fastadv("compare", tmp_path / "gram", "--arm", f"{attack}:baseline=mean", "--no-buckets")
    assert run.returncode == 0, run.stderr
    assert not set(run.stdout + run.stderr) & set("\x1b\x07\u202e\x9b")
    assert run.stdout.count("[red]") >= 4


def test_a_gram_of_an_earlier_report_does_not_stay(replayed: Path, tmp_path: Path) -> None:
    dump, out = write_dump(tmp_path / "dump.pt", samples(2, 2)), tmp_path / "out"
    shutil.copytree(replayed, out)
    (out / "report.html").unlink()
    (out / "report.json").unlink()
    fails("replay", dump, "--out", out, message=r"holds gram\.safetensors already; --overwrite replaces them")
    assert fastadv("replay", dump, "--out", out, "--overwrite").returncode == 0
    assert sorted(path.name for path in out.iterdir()) == ["report.html", "report.json"]


def test_flat_gradients_on_request(tmp_path: Path) -> None:
    dump, out = write_dump(tmp_path / "dump.pt", samples(3, 4)), tmp_path / "out"
    policy = write_policy(tmp_path / "policy")
    run = fastadv("replay", dump, "--policy", policy, "--out", out, "--gradients", "cells", "--no-buckets")
    assert run.returncode == 0, run.stderr
    assert "gradients: flat ones, without intervals and without a file for other arms: --gradients cells" in run.stdout
    assert not (out / "gram.safetensors").exists()
    numbers = json.loads((out / "report.json").read_text())
    assert (numbers["gradients_by"], numbers["projections"], numbers["covered"]) == ("cells", None, None)
    fails(
        "replay", dump, "--policy", policy, "--out", tmp_path / "2", "--gradients", "gram", "--loss", "ppo",
        message="--gradients gram does not go with --loss ppo",
    )  # fmt: skip


@pytest.mark.parametrize("folder", [True, False])
def test_several_dumps(tmp_path: Path, folder: bool) -> None:
    (tmp_path / "dumps").mkdir()
    paths = [write_dump(tmp_path / "dumps" / f"{i}.pt", samples(3, 4, seed=i)) for i in range(3)]
    given = [tmp_path / "dumps"] if folder else paths
    run = fastadv("replay", *given, "--out", tmp_path / "out")
    assert run.returncode == 0, run.stderr
    numbers = json.loads((tmp_path / "out" / "report.json").read_text())
    assert [file["name"] for file in numbers["files"]] == ["0.pt", "1.pt", "2.pt"]
    assert sum(numbers["census"].values()) == 36
    assert len(numbers["prompts"]) == 9
