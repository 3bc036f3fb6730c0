"""`hybrid plan` end to end: what it prints, what it does not import, how long it takes, and its exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hybrid_strategy.cli.main import main

EXAMPLE = ("model=llama3_70b", "cluster=h100_sxm", "cluster.num_nodes=16", "data.global_batch_size=1024", "precision=bf16_mixed")


def _plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["plan", *arguments])
    found = capsys.readouterr()
    return code, found.out, found.err


def test_the_example_without_torch(tmp_path: Path) -> None:
    code = (
        f"import sys; from hybrid_strategy.cli.main import main; assert main(['plan', *{EXAMPLE!r}]) == 0; "
        "assert not {'torch', 'lightning', 'wandb', 'numpy', 'transformers'} & set(sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert list(tmp_path.iterdir()) == []
    for part in (
        "70.55B",
        "where the step goes",
        "leaves the node; +",
        "does not fit: ",
        "Does it fit one GPU? no",
        "node 0",
        "MFU",
    ):
        assert part in found.stdout
    assert "sbatch --nodes=16 --ntasks-per-node=8" in found.stdout
    assert "strategy.tensor_parallel_size=" in found.stdout.splitlines()[-1]
    assert "\x1b" not in found.stdout


def test_what_it_prints_to_paste_is_what_train_would_run(capsys) -> None:
    _, text, _ = _plan(capsys, *EXAMPLE, "--json")
    best = json.loads(text)["search"]
    _, text, _ = _plan(capsys, *EXAMPLE, *best["overrides"], "--json")
    again = json.loads(text)
    assert again["forecast"]["layout"] == best["winner"]["layout"]
    assert again["forecast"]["step_seconds"] == pytest.approx(best["winner"]["step_seconds"])
    assert again["search"]["winner"]["layout"] == best["winner"]["layout"]


def test_what_is_given_is_fixed(capsys) -> None:
    _, text, _ = _plan(capsys, *EXAMPLE, "strategy.pipeline_parallel_size=4", "strategy.tensor_parallel_size=8", "--json")
    for each in json.loads(text)["search"]["best"]:
        assert (each["layout"]["pipeline_parallel_size"], each["layout"]["tensor_parallel_size"]) == (4, 8)
    _, text, _ = _plan(capsys, *EXAMPLE, "strategy.tensor_parallel_size=1", "strategy.sharding=zero3", "--json")
    assert {each["layout"]["tensor_parallel_size"] for each in json.loads(text)["search"]["best"]} == {1}


def test_nothing_fits(capsys) -> None:
    arguments = ("model=llama3_405b", "cluster=h100_sxm", "precision=bf16_mixed")
    code, out, err = _plan(capsys, *arguments)
    assert code == 3
    assert err.startswith("cluster.num_nodes is 1: no layout fits its memory.")
    assert "  cluster.num_nodes=" in out
    code, out, _ = _plan(capsys, *arguments, "--json")
    assert code == 3
    assert json.loads(out)["changes"][0]["overrides"].startswith("cluster.num_nodes=")


def test_a_fixed_layout_that_does_not_fit_names_one_that_does(capsys) -> None:
    code, out, _ = _plan(
        capsys, "model=llama3_8b", "cluster=h100_sxm", "precision=bf16_mixed", "strategy.sharding=ddp", "strategy=dp2"
    )
    assert code == 2  # two of eight processes
    code, out, _ = _plan(
        capsys,
        "model=llama3_8b",
        "cluster=h100_sxm",
        "precision=bf16_mixed",
        "strategy.sharding=ddp",
        "strategy.tensor_parallel_size=1",
        "strategy.pipeline_parallel_size=1",
    )
    assert code == 3
    assert "strategy.sharding=zero" in out


def test_every_line_is_explained(capsys) -> None:
    _, out, _ = _plan(capsys, *EXAMPLE, "--explain", "memory")
    assert "weights, blocks" in out
    assert "arXiv:1910.02054 section 5" in out
    assert "total" in out
    _, out, _ = _plan(capsys, *EXAMPLE, "--explain", "communication")
    assert "reduce_scatter of gradients" in out
    assert "arXiv:2205.05198 section 4.2" in out
    _, configured, _ = _plan(capsys, *EXAMPLE, "--explain", "memory", "--of", "0")
    assert configured != out
    _, out, _ = _plan(capsys, "model=llama_tiny", "--explain", "communication")
    assert "sends nothing" in out


def test_the_ladder_is_commands_that_can_be_planned(capsys) -> None:
    _, out, _ = _plan(capsys, *EXAMPLE, "strategy.pipeline_parallel_size=2", "--ladder")
    commands = [line.split()[2:] for line in out.splitlines() if line.startswith("hybrid train ")]
    assert len(commands) >= 4
    for command in commands:
        assert all(each in command for each in EXAMPLE)
        code, text, _ = _plan(capsys, *command, "--json")
        assert code == 0
        assert json.loads(text)["forecast"]["fits"]


def test_a_batch_smaller_than_the_processes(capsys) -> None:
    code, out, _ = _plan(
        capsys, "model=llama3_8b", "cluster=h100_sxm", "precision=bf16_mixed", "data.global_batch_size=4", "--ladder"
    )
    assert code == 0
    assert "data.global_batch_size=8" in out
    code, out, _ = _plan(capsys, "model=llama3_8b", "cluster=h100_sxm", "precision=bf16_mixed", "data.global_batch_size=4")
    assert "hybrid train refuses this as it stands: data.global_batch_size is 4" in out


def test_a_wide_precision_is_pointed_at(capsys) -> None:
    _, out, _ = _plan(capsys, "model=llama3_8b", "cluster=h100_sxm")
    assert "products are computed in 32 bit: " in out
    assert "with precision=bf16_mixed " in out


def test_a_hugging_face_model(capsys, tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "rope_theta": 500000.0,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = ("model=hf", f"model.config={tmp_path}", "cluster=h100_sxm", "precision=bf16_mixed", "--json")
    found = json.loads(_plan(capsys, *arguments)[1])
    assert found["num_parameters"] == 8_030_261_248
    shorter = json.loads(_plan(capsys, *arguments, "model.sequence_length=2048")[1])
    assert shorter["search"]["title"].startswith("8.03B llama, sequence 2048,")
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "mistral"}))
    other = json.loads(_plan(capsys, *arguments)[1])
    assert other["search"]["title"].startswith("8.03B mistral")
    assert "model.family is 'mistral of Hugging Face'" in other["note"]
    code, _, err = _plan(capsys, "model=hf", "model.config=/nowhere")
    assert code == 2
    assert err.startswith("model.config is '/nowhere': it must be a Hugging Face config.json")


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (["--of", "99"], "--of is 99: there is no such row."),
        (["--top", "0"], "--top is 0: it must be 1 or more."),
        (["--ranks", "3"], "--ranks is '3': only a dry run plays as them"),
        (["data.global_batch_size=-8"], "data.global_batch_size is -8: it must be a whole number of 1 or more."),
        (["data.global_batch_size=1", "cluster.gpus_per_node=7"], "data.global_batch_size is 1: no layout divides it"),
    ],
)
def test_what_says_nothing_is_refused(words: list[str], refusal: str, capsys) -> None:
    assert main(["plan", "model=llama_tiny", "cluster=h100_sxm", *words]) == 2
    assert capsys.readouterr().err.startswith(refusal)
