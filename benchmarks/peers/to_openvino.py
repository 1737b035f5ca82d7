"""A Llama checkpoint as OpenVINO IR: ``python to_openvino.py MODEL_DIR OUT_DIR f16|int8|int4``.

By optimum's exporter. int8: weights alone, asymmetric, a scale per row (its own default). int4:
asymmetric too, a scale per group of 64, the largest that divides rows of 576 and 768; embedding and
head in int8, as by its own default. Activations stay as the plugin has them.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FORMATS = {
    "f16": ["fp16"],
    "int8": ["int8"],
    "int4": ["int4", "--group-size", "64", "--ratio", "1.0"],
}


def main(model: str, target: str, weights: str) -> None:
    exporter = Path(sys.executable).with_name("optimum-cli")
    if not exporter.exists():
        sys.exit("to_openvino.py: no optimum-cli is beside this interpreter: run.py installs one")
    command = [str(exporter), "export", "openvino", "--model", model]
    command += ["--task", "text-generation-with-past", "--weight-format", *FORMATS[weights], target]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main(*sys.argv[1:4])
