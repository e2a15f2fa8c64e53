"""Trains a BERT of transformers to tell which part of Python's standard library a docstring is of.

python examples/hugging_face/classifier.py
horovodrun -np 2 python examples/hugging_face/classifier.py
torchrun --nproc-per-node 2 examples/hugging_face/classifier.py --lora

It needs transformers, datasets and, for --lora, peft; it downloads nothing. Any number of ranks ends with the losses of
one.
"""

import argparse
import ast
import sysconfig
from pathlib import Path

import torch
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertTokenizerFast,
    DataCollatorWithPadding,
    get_linear_schedule_with_warmup,
)

import trainer

PARTS = ("asyncio", "email", "http", "logging", "unittest", "xml")
VOCABULARY = Path(__file__).with_name("vocab.txt")

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=4, help="(default: %(default)s)")
parser.add_argument("--batch-size", type=int, default=16, help="samples per step of all ranks (default: %(default)s)")
parser.add_argument("--lr", type=float, default=2e-3, help="(default: %(default)s)")
parser.add_argument("--lora", action="store_true", help="train low-rank adapters and the last layer only")
parser.add_argument("--strategy", default="auto", help="(default: %(default)s, by launcher)")
parser.add_argument("--output", type=Path, default=Path("runs/hugging-face"), help="(default: %(default)s)")
args = parser.parse_args()


def docstrings() -> Dataset:
    """Return the docstrings of Python's own modules, each with the number of its part."""
    texts, labels = [], []
    for label, part in enumerate(PARTS):
        for file in sorted(Path(sysconfig.get_path("stdlib"), part).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_bytes())):
                if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
                    continue
                if text := ast.get_docstring(node):
                    texts.append(text)
                    labels.append(label)
    return Dataset.from_dict({"text": texts, "labels": labels})


run = trainer.init(args.strategy)
tokenizer = BertTokenizerFast(vocab=str(VOCABULARY))
data = docstrings().map(lambda rows: tokenizer(rows["text"], truncation=True, max_length=64), batched=True)
data = data.remove_columns("text").train_test_split(test_size=0.2, seed=0)

torch.manual_seed(0)
config = BertConfig(
    vocab_size=len(tokenizer),
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=128,
    max_position_embeddings=64,
    num_labels=len(PARTS),
    # Ranks draw other random numbers than one process does; without dropout, they end with its losses.
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
model = AutoModelForSequenceClassification.from_config(config)
if args.lora:
    from peft import LoraConfig, TaskType, get_peft_model

    model = get_peft_model(model, LoraConfig(task_type=TaskType.SEQ_CLS, target_modules=["query", "value"]))
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

collate = DataCollatorWithPadding(tokenizer)
shuffled = torch.Generator().manual_seed(0)
loader = DataLoader(data["train"], args.batch_size, shuffle=True, generator=shuffled, collate_fn=collate)
test_loader = DataLoader(data["test"], args.batch_size, collate_fn=collate)
model, optimizer, loader, test_loader = run.prepare(model, optimizer, loader, evaluation=test_loader)
updates = args.epochs * len(loader)
schedule = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=updates // 10, num_training_steps=updates)

for epoch in run.epochs(args.epochs):
    for batch in run.progress(loader):
        run.backward(model(**batch).loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

    loss, accuracy = run.mean(), run.mean()
    model.eval()
    with torch.no_grad():
        for batch in test_loader:
            outputs = model(**batch)
            loss.add(outputs.loss)
            accuracy.add((outputs.logits.argmax(1) == batch["labels"]).float().mean())
    model.train()
    run.print(f"epoch {epoch + 1}/{args.epochs}: test loss {loss.read():.6f}, accuracy {accuracy.read():.1%}")

state = run.state_dict(model)
if run.is_root:  # for AutoModelForSequenceClassification.from_pretrained, or with --lora PeftModel.from_pretrained
    model.save_pretrained(args.output, state_dict=state)
    tokenizer.save_pretrained(args.output)
