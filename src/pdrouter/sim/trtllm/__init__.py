"""TensorRT-LLM as an emulated engine; ``kind.py`` joins its parts."""
