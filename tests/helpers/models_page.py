"""Writes the tables of docs/models.md: a row for each family, from the engine's own tables and from
what publishers say of their models. `make pages` runs it.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gguf_model import ARCHITECTURES as GGUF_OF

from nanoengine.loading.gguf.settings import ARCHITECTURES as GGUF
from nanoengine.loading.wrappers import WRAPPERS
from nanoengine.models.architecture import Architecture
from nanoengine.models.architectures import ARCHITECTURES
from nanoengine.models.rope import ROPE_KINDS
from nanoengine.text.tool_syntax import BY_NAME

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
WIDTH = 120  # of a line of the page
TABLE = re.compile(r"(<!-- table of (\w+) -->\n).*?(\n<!-- end -->)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Family:
    """classes: its architectures, by config.json's names less their ending. context: tokens, as the
    publishers say. calls: how the models write calls of tools, by rows of TOOL_SYNTAXES. unread:
    forms of calls that are not read.
    """

    name: str
    classes: str
    context: str
    calls: str = ""
    unread: str = ""

    @property
    def architectures(self) -> dict[str, Architecture]:
        """Those of its classes, by their names."""
        names = [f"{name}ForCausalLM" for name in self.classes.split()]
        return {name: ARCHITECTURES[name] for name in names}


FAMILIES = (
    Family("Apertus", "Apertus", "64K", "apertus"),
    Family("Arcee", "Arcee", "64K"),
    Family("Bamba", "Bamba", "4K"),
    Family("Trinity", "Afmoe", "128K, 256K", "hermes"),
    Family(
        "Command",
        "Cohere Cohere2 Cohere2Moe",
        "8K to 500K",
        "cohere_command3",
        "of Command R and Aya",
    ),
    Family("CWM", "Cwm", "128K"),
    Family("DeepSeek", "DeepseekV2 DeepseekV3", "32K to 160K", "deepseek_v3 deepseek_v31"),
    Family("dots", "Dots1", "32K"),
    Family("ERNIE", "Ernie4_5 Ernie4_5_Moe", "128K", "hermes"),
    Family("EXAONE", "Exaone Exaone4 ExaoneMoe", "4K to 256K", "hermes"),
    Family("Falcon-H1", "FalconH1", "16K to 256K"),
    Family("Flint", "Flint", "256K"),
    Family("Kolibri", "Kolibri1", "256K"),
    Family("Gemma 1 and 2", "Gemma Gemma2 VaultGemma", "1K to 8K"),
    Family("Gemma 3", "Gemma3", "32K, 128K"),
    Family("Gemma 4", "Gemma4 Gemma4Unified", "128K, 256K", "gemma4"),
    Family("GLM", "Glm Glm4 Glm4Moe Glm4MoeLite", "32K to 200K", "glm45", "of GLM 4"),
    Family("gpt-oss", "GptOss", "128K", "openai"),
    Family(
        "Granite",
        "Granite GraniteMoe GraniteMoeShared GraniteMoeHybrid GraniteSWA GraniteMoeSWA",
        "4K to 128K",
        "granite hermes",
    ),
    Family("Helium", "Helium", "4K"),
    Family("Hunyuan", "HunYuanDenseV1 HunYuanMoEV1", "256K", "hunyuan_a13b"),
    Family("HyperCLOVA X", "HyperCLOVAX", "32K"),
    Family("InternLM", "InternLM3", "32K"),
    Family("IQuest-Coder", "IQuestCoder", "128K"),
    Family("Jais", "Jais2", "8K"),
    Family("Kimi", "KimiLinear", "1M", "kimi_k2"),
    Family("Laguna", "Laguna", "128K to 1M", "glm45"),
    Family("LFM2", "Lfm2 Lfm2Moe", "32K", "lfm2"),
    Family("LFM3", "Lfm3", "128K"),
    Family("Lara", "LaraMini", "128K"),
    Family("Ling 2.0", "BailingMoeV2", "32K, 128K", "hermes"),
    Family("Ling 3.0", "BailingMoeV3 BailingHybrid", "128K"),
    Family("Llama", "Llama", "4K to 128K", "llama3_json"),
    Family("Mellum", "Mellum", "128K"),
    Family("MiniCPM", "MiniCPM MiniCPM3", "2K to 64K"),
    Family("MiniMax", "MiniMaxM2", "192K", "minimax_m2"),
    Family(
        "Mistral", "Mistral Mixtral Ministral Ministral3 Mistral4", "32K to 1M", "mistral",
    ),
    Family("Muse Glimmer", "MuseGlimmer", "128K", "muse_glimmer"),
    Family("nanochat", "NanoChat", "2K"),
    Family("Nemotron", "Nemotron", "4K, 8K"),
    Family("Nemotron-H", "NemotronH", "8K to 256K", "nemotron_v2 qwen3_coder"),
    Family("OLMo", "Olmo2 Olmo3 Olmoe OlmoHybrid FlexOlmo", "4K, 64K", "olmo3"),
    Family("Phi", "Phi3", "4K to 128K", "phi4_mini_json"),
    Family("Qwen 1.5 to 3", "Qwen2 Qwen2Moe Qwen3 Qwen3Moe", "32K to 256K", "hermes qwen3_coder"),
    Family(
        "Qwen3-Next to 3.6", "Qwen3Next Qwen3_5 Qwen3_5Moe", "256K", "hermes qwen3_coder",
    ),
    Family("Sarvam", "SarvamMoE SarvamMLA", "128K"),
    Family("Seed", "SeedOss", "512K", "seed_oss"),
    Family("SmolLM", "SmolLM3", "64K", "hermes"),
    Family("Solar", "SolarOpen", "128K"),
    Family("StableLM", "StableLm", "4K"),
    Family("StarCoder", "Starcoder2", "16K"),
    Family("Youtu", "Youtu", "128K"),
)  # fmt: skip


def models_page() -> str:
    """docs/models.md with its tables as the engine has them now."""
    tables = {"models": _models, "wrappers": _wrappers, "rope": _rope}
    text = PAGE.read_text(encoding="utf-8")
    return TABLE.sub(lambda found: found[1] + "\n".join(tables[found[2]]()) + found[3], text)


def _models() -> Iterator[str]:
    yield "| models | kind | context | tool calls | GGUF | `architectures` in config.json |"
    yield "|---|---|---|---|---|---|"
    for family in FAMILIES:
        found = family.architectures
        cells = [
            "; ".join(dict.fromkeys(row.models for row in found.values())),
            ", ".join(kinds_of(found)),
            family.context,
            _calls(family),
            _ggufs(family),
            ", ".join(f"`{name}`" for name in found),
        ]
        yield f"| {' | '.join(cells)} |"


def kinds_of(architectures: dict[str, Architecture]) -> list[str]:
    """What the layers of these are, in words of the page."""
    rows = architectures.values()
    mixed = [
        row
        for row in rows
        if row.hybrid in ("apart", "mixers") or (row.experts and row.experts.switch)
    ]
    kinds = {
        "dense": bool(mixed) or any(row.experts is None for row in rows),
        "experts": any(row.experts is not None for row in rows),
        "latent": any(row.latent for row in rows),
        "hybrid": any(row.hybrid != "" for row in rows),
        "windows": any(row.windows == "pattern" or row.ropes_by_kind for row in rows),
        "MTP head": any(row.mtp for row in rows),
    }
    return [kind for kind, is_there in kinds.items() if is_there]


def _ggufs(family: Family) -> str:
    """The names that GGUFs of a family have, and whose GGUFs are not read."""
    found = family.architectures
    names = {name for name, target in GGUF.items() if target in found}
    names |= {GGUF_OF[name] for name in found if name in GGUF_OF}
    if not names:
        return "-"
    read = {found[name].models for name in found if name in GGUF_OF}
    unread = [row.models for row in found.values() if row.models not in read]
    return ", ".join(sorted(names)) + "".join(f"; none of {models}" for models in unread)


def _calls(family: Family) -> str:
    read = [f"`{BY_NAME[name].name}`" for name in family.calls.split()]
    return "; ".join([*read, *([f"not read: {family.unread}"] if family.unread else [])]) or "-"


def _wrappers() -> Iterator[str]:
    names = ", ".join(f"`{name}`" for name in sorted(WRAPPERS))
    yield from textwrap.wrap(f"{names}.", WIDTH)


def _rope() -> Iterator[str]:
    yield f"RoPE: {', '.join(sorted(ROPE_KINDS))}."
