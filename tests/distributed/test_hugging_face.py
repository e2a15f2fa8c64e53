"""docs/hugging-face.md with the real transformers, datasets and PEFT: the losses of one process, and files to load."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.launching import PEERS
from tests.distributed.harness import run_job
from tests.distributed.pages import units
from tests.distributed.snippets import HUGGING_FACE

pytestmark = [pytest.mark.distributed, pytest.mark.needs("peers")]

PYTHON = str(PEERS / "bin/python")
CLASSIFIER = "examples/hugging_face/classifier.py"
LOAD = """
import sys
from transformers import AutoModelForSequenceClassification, AutoTokenizer
model, tokenizer = (kind.from_pretrained(sys.argv[1]) for kind in (AutoModelForSequenceClassification, AutoTokenizer))
logits = model(**tokenizer("Return the running event loop of this coroutine", return_tensors="pt")).logits
print("part", logits.argmax(1).item())
"""


def losses(launcher: str, ranks: int, folder: Path, *options: str) -> list[float]:
    script = [CLASSIFIER, "--epochs", "2", "--output", str(folder), *options]
    outcome = run_job(launcher, ranks, script, env={"OMP_NUM_THREADS": "1"}, python=PYTHON)
    assert outcome.code == 0, outcome.output
    return [float(loss) for loss in re.findall(r"test loss (\d+\.\d{6})", outcome.output)]


@pytest.mark.parametrize("launcher", ["horovodrun-mpi", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_a_classifier_has_the_losses_of_one_process_and_is_loaded_by_transformers(
    launcher: str, tmp_path: Path
) -> None:
    alone = losses("python", 1, tmp_path / "alone")
    assert losses(launcher, 2, tmp_path / "both") == pytest.approx(alone, abs=1e-4)
    assert alone[1] < alone[0]
    loaded = run_job("python", 1, ["-c", LOAD, str(tmp_path / "both")], python=PYTHON)
    assert "part 0" in loaded.output, loaded.output


@pytest.mark.slow
def test_adapters_have_the_losses_of_one_process(tmp_path: Path) -> None:
    alone = losses("python", 1, tmp_path / "alone", "--lora")
    assert losses("torchrun", 2, tmp_path / "both", "--lora") == pytest.approx(alone, abs=1e-4)
    assert (tmp_path / "both" / "adapter_model.safetensors").stat().st_size > 10_000


@pytest.mark.slow
def test_a_language_model_weighs_tokens(tmp_path: Path) -> None:
    [script] = [unit.text for unit in units("python") if unit.page == HUGGING_FACE]
    told = "\nrun.print('weights', sum(p.double().square().sum().item() for p in model.parameters()))\n"
    (tmp_path / "train.py").write_text(script + told)
    norms = []
    for launcher, ranks in (("python", 1), ("horovodrun-gloo", 2)):
        outcome = run_job(launcher, ranks, [str(tmp_path / "train.py")], env={"OMP_NUM_THREADS": "1"}, python=PYTHON)
        assert outcome.code == 0, outcome.output
        norms += [float(norm) for norm in re.findall(r"weights (\S+)", outcome.output)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-6)
