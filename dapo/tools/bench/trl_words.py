"""Trains on the word problems of `+experiment=smollm2_cpu` with TRL's GRPOTrainer (`loss_type=dapo`), for comparison:

    python -m dapo.bench.trl_words MODEL OUT.jsonl [--max-seconds N] [--lr ...] ...

In an environment with trl and this project's requirements (`pip install --no-deps trl==1.16.0`). Model, data, reward,
threads and held-out problems are that experiment's. Writes a JSON line per optimizer step and per evaluation; `seconds`
leave evaluations out.

With `--speed`, seconds a batch and tokens per second: MODEL is a name in config/models, whose weights are random, and
`python -m dapo.bench step --model MODEL` is the same work here. `--vllm` generates with vLLM in the trainer's process,
on its GPU.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import get_soft_overlong_punishment

from dapo.ground.table import table
from dapo.rewards.math import compute_score
from dapo.smollm2.word_problems import tables
from dapo.tiny import even_length
from dapo.tools.bench.setting import random_model

PROMPT = 512  # tokens at most, here with one for each byte
WARM_UP = 2  # batches before the measured ones


def right(completions: list[Any], truth: list[str], **_: Any) -> list[float]:
    return [
        compute_score("", each[0]["content"], answer)["score"] for each, answer in zip(completions, truth, strict=True)
    ]


def even(completions: list[Any], **_: Any) -> list[float]:
    return [even_length.compute_score("", each[0]["content"], "") for each in completions]


def problems(name: str) -> list[dict[str, Any]]:
    return [{"prompt": row["prompt"], "truth": row["reward_model"]["ground_truth"]} for row in tables()[name]]


class HeldOut(TrainerCallback):
    """Writes what the run does, evaluates every so many steps, and ends it in time."""

    def __init__(self, given: argparse.Namespace, tokenizer: Any) -> None:
        self._given, self._tokenizer = given, tokenizer
        self._problems = problems("val.parquet")
        self._began, self._away = time.monotonic(), 0.0
        self._out = given.out.open("w")

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began - self._away

    def _write(self, **line: Any) -> None:
        print(json.dumps({"seconds": round(self.seconds, 1), **line}), file=self._out, flush=True)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._began = time.monotonic()
        self._evaluate(0, kwargs["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        late = self.seconds > self._given.max_seconds
        if late or state.global_step % self._given.eval_every == 0:
            self._evaluate(state.global_step, kwargs["model"])
        control.should_training_stop = control.should_training_stop or late

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        self._write(step=state.global_step, **(logs or {}))

    @torch.no_grad()
    def _evaluate(self, step: int, model: Any) -> None:
        began, correct = time.monotonic(), 0
        model.eval()
        for start in range(0, len(self._problems), 64):
            part = self._problems[start : start + 64]
            texts = [
                self._tokenizer.apply_chat_template(one["prompt"], add_generation_prompt=True, tokenize=False)
                for one in part
            ]
            inputs = self._tokenizer(texts, return_tensors="pt", padding=True, padding_side="left").to(model.device)
            made = model.generate(
                **inputs,
                max_new_tokens=self._given.length,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
            )
            answers = self._tokenizer.batch_decode(made[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
            correct += sum(
                compute_score("", text, one["truth"])["acc"] for text, one in zip(answers, part, strict=True)
            )
        model.train()
        self._away += time.monotonic() - began
        self._write(step=step, held_out=correct / len(self._problems))


class Speed(TrainerCallback):
    """Times whole batches: generation, reward, optimizer steps."""

    def __init__(self, steps_per_batch: int) -> None:
        self._steps, self._began = steps_per_batch, 0.0
        self.seconds: list[float] = []
        self.lengths: list[float] = []  # mean tokens of the responses

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._began = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self._steps == 0:
            now = time.monotonic()
            self.seconds.append(now - self._began)
            self._began = now

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if length := (logs or {}).get("completions/mean_length"):
            self.lengths.append(length)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--speed", action="store_true", help="measure whole batches on random weights; no evaluation")
    parser.add_argument("--vllm", action="store_true", help="on a GPU, with vLLM in this process")
    parser.add_argument("--vllm-memory", type=float, default=0.3, help="its share of the GPU")
    parser.add_argument("--length", type=int, default=64, help="tokens of a response at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=3e-5)
    parser.add_argument("--groups", type=int, default=8, help="of a batch")
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--steps-per-batch", type=int, default=2, help="optimizer steps that a batch is cut into")
    parser.add_argument("--micro-batch", type=int, default=16, help="responses in a forward pass")
    parser.add_argument("--max-steps", type=int, default=1000)
    parser.add_argument("--max-seconds", type=float, default=3600)
    parser.add_argument("--eval-every", type=int, default=20, help="optimizer steps")
    # With the experiment's 16 the answers shrink: groups without a right one, which TRL keeps, train on their length.
    parser.add_argument("--overlong", type=int, default=0, help="tokens of the soft overlong punishment; 0: none")
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    with tempfile.TemporaryDirectory() as folder:
        path = str(random_model(given.model, Path(folder) / "model")) if given.speed else given.model
        train(given, path)


def train(given: argparse.Namespace, path: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(path)
    responses = given.groups * given.group_size
    accumulate = responses // given.steps_per_batch // given.micro_batch
    cuda = torch.cuda.is_available()
    config = GRPOConfig(
        output_dir=f"{given.out}.trl",
        seed=given.seed,
        use_cpu=not cuda,
        bf16=cuda,  # weights and optimizer are float32, as here
        learning_rate=1e-12 if given.speed else given.lr,
        lr_scheduler_type="constant",
        weight_decay=0.1,
        adam_beta2=0.98,
        max_grad_norm=1.0,
        per_device_train_batch_size=given.micro_batch,
        gradient_accumulation_steps=accumulate,
        steps_per_generation=accumulate * given.steps_per_batch,
        num_generations=given.group_size,
        max_completion_length=given.length,
        max_steps=given.max_steps,
        loss_type="dapo",
        epsilon=0.2,
        epsilon_high=0.28,
        beta=0.0,
        temperature=1.0,
        gradient_checkpointing=cuda,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        model_init_kwargs={"dtype": "float32"},
        use_vllm=given.vllm,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=given.vllm_memory,
        vllm_max_model_length=PROMPT + given.length,
    )
    speed = Speed(given.steps_per_batch)
    rewards = [right, *([get_soft_overlong_punishment(given.length, given.overlong)] if given.overlong else [])]
    GRPOTrainer(
        model=path,
        reward_funcs=[even] if given.speed else rewards,
        args=config,
        train_dataset=Dataset.from_list(problems("train.parquet")),
        processing_class=tokenizer,
        callbacks=[speed if given.speed else HeldOut(given, tokenizer)],
    ).train()
    if given.speed:
        seconds = statistics.median(speed.seconds[WARM_UP:])
        tokens = responses * statistics.mean(speed.lengths[WARM_UP * given.steps_per_batch :])
        names = ("batches", "s a batch", "response tokens", "tokens/s")
        cells = [str(len(speed.seconds) - WARM_UP), f"{seconds:.2f}", f"{tokens:.0f}", f"{tokens / seconds:.0f}"]
        print(table(names, [cells]))
        given.out.write_text(json.dumps({"seconds": speed.seconds, "mean_length": speed.lengths}) + "\n")


if __name__ == "__main__":
    main()
