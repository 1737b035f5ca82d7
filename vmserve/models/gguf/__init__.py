"""GGUF files: weights, configuration and tokenizer of a model in one file, read without torch.

``reader`` checks and maps a file, ``block_types`` names its element types, ``repack`` makes the two
forms of quantized weights that kernels multiply by, ``dequantize`` makes float32, ``config``
translates metadata and tensor names to a decoder's description. Tokenizers:
:mod:`vmserve.text.tokenizer_gguf`.
"""
