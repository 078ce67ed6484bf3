"""The core runs without the parts around it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from marks import needs_compiler

from nanoengine import LLM, SamplingParams

PACKAGE = Path(__file__).parents[2] / "nanoengine"
AROUND_THE_CORE = ("bench", "cli", "serving", "workers", "text/grammar.py")
AROUND_THE_CORE += ("text/thinking.py", "ray.py", "__main__.py")
RUN = """
import sys
from nanoengine import LLM, SamplingParams
with LLM(sys.argv[2], device="cpu", dtype="float32", kvcache_block_size=8, num_gpu_blocks=2,
         enable_cpu_offload=True, offload_mode="stream", kv_offload_gib=0.001) as llm:
    output = llm.generate([[1, 2, 3] * 9], SamplingParams(temperature=0, max_tokens=5))[0]
    print(output.outputs[0].token_ids, llm.llm_engine.kv.counters.fill_bytes > 0)
# An editable install would lend the parts that were deleted.
ours = [module.__file__ for name, module in sys.modules.items() if name.startswith("nanoengine")]
assert all(file.startswith(sys.argv[1]) for file in ours), ours
# PyTorch's compiler is more than a second at the first step of every process.
assert "torch._dynamo" not in sys.modules
"""


@needs_compiler
def test_the_core_streams_without_what_is_around_it(
    tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    package = tmp_path / "nanoengine"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in AROUND_THE_CORE:
        if (part := package / name).is_dir():
            shutil.rmtree(part)
        else:
            part.unlink()
    ran = subprocess.run(
        [sys.executable, "-c", RUN, str(tmp_path), str(tiny("llama"))],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    with LLM(tiny("llama"), device="cpu", dtype="float32", num_gpu_blocks=8) as llm:
        resident = llm.generate([[1, 2, 3] * 9], SamplingParams(temperature=0, max_tokens=5))[0]
    assert ran.stdout.strip() == f"{resident.outputs[0].token_ids} True"
