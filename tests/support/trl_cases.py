"""Real trainers of TRL on a tiny Llama of random weights, offline; also a program for ``requestzero.run``."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState
from transformers import PreTrainedTokenizerFast, set_seed

from support.tiny_llama import tiny_llama
from support.whole_weights import whole

CASES = ("sft", "dpo", "grpo", "lora")
WORDS = [f"w{index}" for index in range(28)]
STAGE_2 = {
    "train_micro_batch_size_per_gpu": "auto",
    "train_batch_size": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_optimization": {"stage": 2},
    "zero_force_ds_cpu_optimizer": False,
}
OFFLOAD = {
    **STAGE_2,
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu"},
        "retain_gpu_grad_partition_until_step": True,
    },
}

STAGE_3 = {**STAGE_2, "zero_optimization": {"stage": 3}}


def tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    names = ["<pad>", "<eos>", "<unk>", "<bos>", *WORDS]
    made = Tokenizer(WordLevel({name: index for index, name in enumerate(names)}, unk_token="<unk>"))
    made.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def text(seed: int) -> str:
    """Of uneven length."""
    generator = torch.Generator().manual_seed(seed)
    length = int(torch.randint(4, 12, (1,), generator=generator))
    return " ".join(WORDS[index] for index in torch.randint(0, len(WORDS), (length,), generator=generator))


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(sum(map(ord, text)) % 7) for text in completions]


def common(**options: Any) -> dict[str, Any]:
    return {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 2,
        "learning_rate": 1e-2,
        "optim": "adamw_torch",
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 1,
        **options,
    }


def trainer_of(case: str, arguments_class: Any = None, plugin: Any = None, **options: Any) -> Any:
    """The trainer of a case.

    Args:
        case: one of ``CASES``.
        arguments_class: makes the class of the arguments of TRL's; not given: that itself.
        plugin: gets the arguments and puts a plugin in.
        options: more arguments.
    """
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

    config: Any
    config, cls = {"dpo": (DPOConfig, DPOTrainer), "grpo": (GRPOConfig, GRPOTrainer)}.get(case, (SFTConfig, SFTTrainer))
    config = arguments_class(config) if arguments_class is not None else config
    extra: dict[str, Any] = {}
    if case == "dpo":
        keys = ("prompt", "chosen", "rejected")
        rows = [{key: text(3 * row + place) for place, key in enumerate(keys)} for row in range(16)]
        extra = {"ref_model": seeded_llama()}
    elif case == "grpo":
        rows = [{"prompt": text(row)} for row in range(16)]
        options = {"num_generations": 2, "max_completion_length": 4, "beta": 0.0, **options}
        extra = {"reward_funcs": reward}
    else:
        rows = [{"text": text(row)} for row in range(16)]
    if case == "lora":
        from peft import LoraConfig

        options = {"gradient_checkpointing": True, **options}
        extra = {"peft_config": LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)}
    args = config(**common(**options))
    if plugin is not None:
        plugin(args)
    model = seeded_llama()
    set_seed(7)  # of the adapters
    rows_of_case = Dataset.from_list(rows)
    if options.get("eval_strategy"):
        extra["eval_dataset"] = rows_of_case
    return cls(model=model, args=args, train_dataset=rows_of_case, processing_class=tokenizer(), **extra)


def seeded_llama() -> Any:
    set_seed(0)
    return tiny_llama(eos_token_id=1, pad_token_id=0, bos_token_id=3)


def weights_of(trainer: Any) -> torch.Tensor:
    trained = [p for p in trainer.model.parameters() if p.requires_grad]
    with whole(trained):
        return torch.cat([p.detach().flatten().float().cpu() for p in trained])


def main(directory: str) -> None:
    """Train all cases, and one at stage 3, with TRL's own configs, and save what ``tests/trl`` compares."""
    found = {}
    for case, deepspeed in [*((case, STAGE_2) for case in CASES), ("sft", STAGE_3)]:
        trainer = trainer_of(case, deepspeed=deepspeed)
        trainer.train()
        name = case if deepspeed is STAGE_2 else f"{case} at stage 3"
        found[name] = weights_of(trainer), type(trainer.deepspeed.optimizer).__name__
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
    if os.environ["RANK"] == "0":
        torch.save(found, Path(directory, "found.pt"))


if __name__ == "__main__":
    main(*sys.argv[1:])
