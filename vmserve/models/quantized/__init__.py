"""Safetensors checkpoints that GPTQ, AWQ or compressed-tensors quantized."""
