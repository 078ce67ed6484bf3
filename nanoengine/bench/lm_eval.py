"""lm-eval's own command with the model type `nanoengine` added.

python -m nanoengine.bench.lm_eval run --model nanoengine --model_args pretrained=MODEL --tasks NAME

lm-eval 0.4 finds model types of other packages in no other way; from Python, importing
nanoengine.bench.lm_eval_model is enough.
"""

from __future__ import annotations

import sys

MISSING = "this needs lm-eval: pip install 'lm_eval[api]'"


def main() -> int:
    """Run lm-eval with the command line's arguments. Returns 1 if lm-eval is not installed."""
    try:
        from lm_eval.__main__ import cli_evaluate
    except ModuleNotFoundError as error:
        print(f"error: {MISSING} ({error})", file=sys.stderr)
        return 1
    import nanoengine.bench.lm_eval_model  # noqa: F401  # registers the type

    cli_evaluate()
    return 0


if __name__ == "__main__":
    sys.exit(main())
