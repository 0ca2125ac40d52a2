"""vLLM as an emulated engine: endpoints, connectors, metrics."""
