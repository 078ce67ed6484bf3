"""Which weights become codes as they are loaded: "int8" and "int4" on a CPU. Knows no kernel.

The formats are those of GGUF files (stored_codes.py).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from nanoengine.models.stored_codes import ROUTERS, CodedRows

METHODS = ("int8", "int4")
# The codes of a weight of this name, of the whole weight or of some of its rows; None: it stays
# numbers.
Coder = Callable[[str, Tensor], CodedRows | None]
BLOCK = 32  # inputs
EMBEDDINGS = "model.embed_tokens.weight"
ENDS = (EMBEDDINGS, "lm_head.weight")
# Small matrices in layers whose errors weigh much: routers, and what the decays of a recurrent
# layer come from.
_AS_THEY_ARE = (*ROUTERS, *(f"linear_attn.in_proj_{name}.weight" for name in ("b", "a", "ba")))
# In "int4", those of layers that take 8 bits: a few percent of the weights, a sixth of the loss.
_IN_8_BITS = ("v_proj.weight",)


def made_format(method: str, name: str, shape: tuple[int, ...]) -> str:
    """What a weight of this name and shape becomes, a key of FORMATS; "": it stays numbers.

    method: one of METHODS. shape: of the whole weight or of some of its rows.
    """
    if len(shape) != 2 or shape[1] % BLOCK or name.endswith(_AS_THEY_ARE):
        return ""
    if name in ENDS:
        return "Q8_0"
    if ".layers." not in name:
        return ""
    return "Q8_0" if method == "int8" or name.endswith(_IN_8_BITS) else "Q4_1"
