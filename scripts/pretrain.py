"""Pretrains a language model: ``python scripts/pretrain.py precision=bf16_with_fp8_mixed model=llama_tiny``.

The same as ``nemo-lowprec pretrain``.
"""

import sys

from nemo_lowprec.cli import main

if __name__ == "__main__":
    sys.exit(main(["pretrain", *sys.argv[1:]]))
