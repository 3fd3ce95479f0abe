"""Runs `mst eval`, which evaluates a model on the paper's tasks."""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from mst_scale.cli import add_command
from mst_scale.comm.parser import validate_folder
from mst_scale.errors import UserError

TEXT = """\
Evaluate a model on the paper's tasks with lm-evaluation-harness (pip install 'mst_scale[eval]'). If the model has one
of the paper's sizes, and GPT-2's vocabulary and context, the paper's results are shown next to its own.

MODEL is the folder of a run or a checkpoint (also one of Trainer, Accelerate or your own loop), a transformers folder
(as `mst export` writes it), a compact file (`mst export --compact`), or a name on the Hugging Face hub: `gpt2` is
OpenAI's checkpoint.

TASKS: lambada, wikitext2, ptb, wikitext103, 1bw, rte, mrpc, or all. Their documents come from the hub, or from files in
--data-dir, named after the task:

  lambada.jsonl     one {"text": "…"} per line, whose last word is predicted; or lambada.txt, one passage per line
  wikitext2.txt     the plain text; or wikitext2.jsonl, one {"text": "…"} per line, joined by empty lines
  rte.jsonl         one {"sentence1": "…", "sentence2": "…", "label": 0 or 1} per line, with GLUE's labels
  rte.train.jsonl   the same, as examples for the prompt (--shots)

Perplexities are per token (as, we assume, the paper's) and per word (separated by blanks). A text is one sequence and
is not detokenized. It is read in windows of the context that advance by --stride: every token, except the first
context - stride of a text, is predicted from at least context - stride tokens. LAMBADA is scored per word:
all tokens of the last word must be the most likely ones.

The result is also written to eval.json in the folder of the run or model (or to --out). The same command completes an
evaluation that was killed; results of other checkpoints or settings in that file are kept. For several processes:
torchrun --nproc_per_node 2 -m mst_scale eval …, or mpirun -n 2 mst eval …; each uses its own GPU.

examples:
  mst eval runs/gpt2 --tasks lambada,wikitext2
  mst eval exported/gpt2 --tasks all --shots 5 --json
  mst eval gpt2 --tasks wikitext103 --data-dir data/eval --stride 1024
"""


def add(subparsers: Any) -> None:
    """Add the command to the parser."""
    about = "evaluate a model on LAMBADA, WikiText, PTB, 1BW, RTE and MRPC"
    option = add_command(subparsers, "eval", run, about, TEXT).add_argument
    option(
        "model",
        metavar="MODEL",
        help="a run, a checkpoint, a transformers folder, a compact file, or a hub name",
    )
    option("--tasks", required=True, metavar="A,B", help="names separated by commas, or all")
    option("--data-dir", metavar="DIR", help="folder of the tasks' documents (default: from the hub)")
    option("--tokenizer", metavar="NAME", help="byte, gpt2 or a .tiktoken file (default: the model's own)")
    option("--config", metavar="FILE", help="the experiment, for a checkpoint outside the folder of its run")
    option("--context", type=int, metavar="N", help="length of the windows (default: the model's context)")
    option("--stride", type=int, metavar="N", help="tokens by which a window advances (default: half the context)")
    option("--shots", type=int, default=5, metavar="N", help="examples in the prompts of rte and mrpc (default: 5)")
    option("--batch-size", type=int, default=8, metavar="N", help="windows per forward pass (default: 8)")
    option("--device", metavar="D", help="cpu, cuda or cuda:N (default: cuda if there is a GPU, else cpu)")
    option("--out", metavar="FILE", help="file for the result (default: eval.json in the model's folder)")
    option("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Evaluate on one process, or on the ranks that a launcher has started."""
    from mst_scale.evaluation.tasks import choose

    tasks = choose(args.tasks)
    if args.batch_size < 1:
        raise UserError(f"--batch-size must be at least 1, not {args.batch_size}")
    if args.out:
        if Path(args.out).is_dir():
            raise UserError(f"--out {args.out!r} is a folder, but must be a file")
        validate_folder("--out", Path(args.out).parent)
    if args.json:
        logging.getLogger("mst_scale").setLevel(logging.WARNING)
    if args.device in (None, "cpu"):
        os.environ.setdefault("DS_ACCELERATOR", "cpu" if args.device == "cpu" or not _cuda() else "cuda")
    from mst_scale.evaluation.models import on_hub
    from mst_scale.hugging_face.start_from import offline_unless_reachable

    host = offline_unless_reachable() if on_hub(args.model) or args.data_dir is None else None
    if host is not None:
        print(f"{host} cannot be reached: only cached files can be used", file=sys.stderr)
    from mst_scale import comm

    if not comm.several():
        return _evaluate(args, tasks, None)
    ranks = comm.init()
    try:
        code = _evaluate(args, tasks, ranks)
    except BaseException as error:
        comm.end(error)
    ranks.leave()
    return code


def _cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def device_of(asked: str | None, local_rank: int) -> Any:
    """Return the device of this rank for --device; every rank gets its own GPU."""
    import torch

    asked = asked or ("cuda" if _cuda() else "cpu")
    if asked.startswith("cuda") and not _cuda():
        raise UserError(f"--device {asked}: torch does not find a GPU")
    if not re.fullmatch(r"cpu|cuda(:[0-9]+)?", asked):
        raise UserError(f"--device {asked}: no such device; use cpu, cuda or cuda:N")
    device = torch.device(f"cuda:{local_rank}" if asked == "cuda" else asked)
    if device.type == "cuda" and int(device.index) >= (count := torch.cuda.device_count()):
        raise UserError(f"--device {asked}: there is no {device}; this machine has {count} GPU(s)")
    return device


def _evaluate(args: argparse.Namespace, tasks: Any, ranks: Any) -> int:
    from mst_scale import comm
    from mst_scale.evaluation import harness
    from mst_scale.evaluation.evaluate import FILE, Settings, as_json, evaluate, read_documents, validate_lengths
    from mst_scale.evaluation.models import open_model
    from mst_scale.evaluation.paper import comparable, table

    settings = Settings(
        data_dir=None if args.data_dir is None else Path(args.data_dir),
        context=args.context,
        stride=args.stride,
        shots=args.shots,
        batch=args.batch_size,
    )

    def prepare() -> Any:
        device = device_of(args.device, 0 if ranks is None else ranks.local_rank)
        harness.load()
        docs = read_documents(tasks, settings)
        model, text = open_model(args.model, args.tokenizer, device, Path(args.config) if args.config else None)
        settings.windows_of(model)
        validate_lengths(docs, tasks, text)
        return docs, model, text

    docs, model, text = prepare() if ranks is None else ranks.agree(prepare)
    out = Path(args.out) if args.out else None if model.folder is None else model.folder / FILE
    first = ranks is None or ranks.first
    if out is not None:
        if ranks is None:
            _check_writable(out)
        else:
            ranks.on_first(lambda: _check_writable(out))

    def print_progress(message: str) -> None:
        if first and not args.json:
            print(message, file=sys.stderr)

    try:
        result = evaluate(model, text, tasks, docs, settings, out=out, ranks=ranks, log=print_progress)
    except RuntimeError as error:
        if not comm.is_out_of_memory(error):
            raise
        raise MemoryError("out of memory: reduce --batch-size, or --context for shorter windows") from error
    if first:
        with_paper = comparable(result["settings"]["context"], model.vocab_size, model.parameters)
        rows = table(result["tasks"], with_paper=with_paper)
        print(as_json(result) if args.json else _format_result(result, rows, out, with_paper))
    return 0


def _check_writable(out: Path) -> None:
    """Create the folder of the results, and check that they can be written there before anything is evaluated."""
    from mst_scale.evaluation.evaluate import holds_results

    if out.is_file() and out.stat().st_size and not holds_results(out):
        raise UserError(f"{out} exists and holds something else: name another file with --out")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out.parent):
            pass
    except OSError as error:
        raise UserError(f"{out.parent} cannot be written ({error.strerror}): name another file with --out") from None


def _format_result(result: dict[str, Any], table: str, out: Path | None, with_paper: bool) -> str:
    """Format the result: the table, the settings, and whether the table has the paper's rows."""
    s = result["settings"]
    step = "" if result["step"] is None else f", step {result['step']:,}"
    lines = [f"{result['model']}{step}, tokenizer {result['tokenizer']}", "", table, ""]
    settings = f"windows of {s['context']} tokens, stride {s['stride']}, not detokenized"
    if any(name in ("rte", "mrpc") for name in result["tasks"]):
        settings += f"; rte and mrpc with {s['shots']} examples"
    lines.append(f"{settings}.")
    if with_paper:
        lines.append("The paper's rows: GPT-2 small on OpenWebText, as printed.")
    else:
        lines.append("The paper's rows are not shown: its models are GPT-2 small and Tiny with context 1024.")
    if out is not None:
        lines.append(f"written to {out}")
    return "\n".join(lines)
