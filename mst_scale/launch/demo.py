"""Pretrain the small GPT of ds_configs/demo.json on two processes of this machine, into runs/demo.

  bash launchers/demo.sh [arguments of mst_scale.pretrain]

A demo that has finished is shown again, and one that was stopped continues. For a new one remove runs/demo. At the end,
two lines of text that the model writes are shown next to two lines of the dense baseline.
"""

from __future__ import annotations

from pathlib import Path

from mst_scale.config.presets import shipped_folder
from mst_scale.errors import Damaged, UserError
from mst_scale.launch import local
from mst_scale.launch.environment import default_processes, gpus, set_default
from mst_scale.launch.supervisor import print_message, unblock
from mst_scale.pretrain.outcome import folder_of

CONFIG = "ds_configs/demo.json"
# The dense run of the study `demo` with the baseline's loss (8 sequences per step, rate 0.004, seed 1), in bfloat16.
BASELINE = "demo_dense.safetensors"
PROMPT, TOKENS, TEMPERATURE = "    def ", 110, 0.5


def main(words: list[str]) -> int:
    """Run the demo and show what the model writes; all words go to `mst_scale.pretrain`."""
    if not gpus():
        set_default("OMP_NUM_THREADS", "1")
    arguments = ["--out", "runs/demo", *words]
    code = local.run(CONFIG, arguments, min(default_processes(), 2))
    unblock()  # nothing is left to save
    if code == 0 and (run := folder_of(["--deepspeed_config", CONFIG, *arguments])) is not None:
        show(run)
    return code


def show(run: Path) -> None:
    """Print two lines that the run's model writes, and two of the dense baseline."""
    try:
        texts = {str(run): two_lines(run), "dense baseline": two_lines(shipped_folder("ds_configs") / BASELINE)}
    except (UserError, Damaged, OSError) as error:  # the run itself has succeeded
        print_message(f"no text is shown: {error}")
        return
    width = max(map(len, texts))
    print(f"\ntext that the models generate after {PROMPT.strip()!r} (more: mst generate {run} --prompt TEXT):")
    for name, lines in texts.items():
        for number, line in enumerate(lines):
            print(f"  {'' if number else name:{width}}  {line}")


def two_lines(model: Path) -> list[str]:
    """Return the prompt and what a model writes after it, up to the second line that is not empty."""
    from mst_scale.generation.generate import generate  # imports torch

    done = generate(model, PROMPT, tokens=TOKENS, temperature=TEMPERATURE)
    return [line for line in (PROMPT + done.text).splitlines() if line.strip()][:2]
