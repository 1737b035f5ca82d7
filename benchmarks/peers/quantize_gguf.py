"""Converts a GGUF file by llama.cpp's own quantizer: ``quantize_gguf.py IN.gguf OUT.gguf TYPE``.

Needs llama.cpp's library and its Python bindings. What is quantized already is dequantized first.
"""

from __future__ import annotations

import os
import sys

try:
    import llama_cpp
except ImportError as error:
    sys.exit(f"quantize_gguf.py: {error}: it runs in llama.cpp's environment, which run.py makes")


def main(source: str, target: str, kind: str) -> None:
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind.upper()}")
    params.nthread = len(os.sched_getaffinity(0))
    params.allow_requantize = True
    status = llama_cpp.llama_model_quantize(source.encode(), target.encode(), params)
    if status != 0:
        raise RuntimeError(f"llama.cpp's quantizer of {kind}: status {status}")


if __name__ == "__main__":
    main(*sys.argv[1:4])
