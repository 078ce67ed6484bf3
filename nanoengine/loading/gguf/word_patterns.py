"""How tokenizers of a GGUF split text into words, by llama.cpp's names (`tokenizer.ggml.pre`)."""

from __future__ import annotations

_CONTRACTION = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LETTERS = r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
_OF_ONE_CASE = rf"[^\r\n\p{{L}}\p{{N}}]?(?:{_UPPER}*{_LOWER}+|{_UPPER}+{_LOWER}*)"
_REST_WITH_SLASHES = _REST.replace(r"[\r\n]*", r"[\r\n/]*")
_LIKE_GPT_4O = _OF_ONE_CASE + _CONTRACTION + r"?|\p{N}{1,3}" + _REST_WITH_SLASHES
# Letters with two cases, as DeepSeek-V2's tokenizer lists them.
_CASED_OF_DEEPSEEK = (
    "A-Za-z\xb5\xc0-\xd6\xd8-\xf6\xf8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-"
    "\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5"
    "\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-"
    "\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20"
    "-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc"
    "\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6"
    "-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-"
    "\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-"
    "\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-"
    "\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-"
    "\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-"
    "\U000118df\U0001e900-\U0001e943"
)
# The word patterns of the models' own tokenizers; each splits what those before it have left.
# Contractions are spelt out, as llama.cpp has them: an ignore-case group would also match the long
# s.
WORD_PATTERNS: dict[str, tuple[str, ...]] = {
    "qwen2": (_CONTRACTION + _LETTERS + r"\p{N}" + _REST,),
    "laguna": (r"[^\n]+|\n+", _CONTRACTION + _LETTERS + r"\p{N}" + _REST),
    "qwen35": (
        _CONTRACTION
        + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
        + _REST.replace(r"\p{L}", r"\p{L}\p{M}"),
    ),
    "dbrx": (_CONTRACTION + _LETTERS + r"\p{N}{1,3}" + _REST,),
    "glm4": (_CONTRACTION + _LETTERS + r"\p{N}{1,3}" + _REST,),
    "llama-bpe": (_CONTRACTION + _LETTERS + r"\p{N}{1,3}" + _REST,),
    "gpt-4o": (_LIKE_GPT_4O,),
    "minicpm5": (r"\p{N}{1,3}", _CONTRACTION + _LETTERS + r"\p{N}+" + _REST),
    "tiny_aya": (r"\d{1,3}(?=(?:\d{3})*\b)", _LIKE_GPT_4O),
    "ufakzeka": (_LETTERS[1:] + r"\p{N}" + _REST,),
    "youtu": (
        "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c"
        "\u3001-\u303f\ufe30-\ufe4f]+|[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        _LIKE_GPT_4O.replace(r"\p{N}{1,3}", r"\p{N}"),
    ),
    "seed-coder": (_CONTRACTION + _LETTERS + r"\p{N}" + _REST.replace(r"[\r\n]*", "", 1),),
    "kimi-k2": (
        r"\p{Han}+|"
        + _OF_ONE_CASE.replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]")
        + _CONTRACTION
        + r"?|\p{N}{1,3}"
        + _REST,
    ),
    "tekken": (_OF_ONE_CASE + r"|\p{N}" + _REST_WITH_SLASHES,),
    "deepseek-coder": (
        r"[\r\n]",
        r"\s?\p{L}+",
        r"\s?\p{P}+",
        "[\u0800-\u9fa5\uac00-\ud7ff]+",
        r"\p{N}",
    ),
    "jais-2": (
        _CONTRACTION
        + _LETTERS
        + r"\p{N}{1,3}"
        + _REST.removesuffix(r"|\s+(?!\S)|\s+")
        + "".join(rf"|\s{{{2**i}}}(?!\S)" for i in range(9, 1, -1))
        + r"|\s{1,2}(?!\S)|\s",
    ),
    "exaone-moe": (
        _CONTRACTION
        + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
        + r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
    ),
    "afmoe": (
        r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",
        "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u30ff\uff65-\uff9f\u2f00-\u2fdf"
        "\u0e40-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af"
        "\u1100-\u11ff]+",
        r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    # What llama.cpp takes for files without a name.
    "default": (
        r"[\p{P}\$\+<=>\^~\|]+",
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
        r"\p{N}+",
        "[0-9][0-9][0-9]",
    ),
    "deepseek-llm": (
        r"[\r\n]",
        rf"\s?[{_CASED_OF_DEEPSEEK}]+",
        "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$",
        "[\u0800-\u9fa5\uac00-\ud7ff]+",
        r"\p{N}",
    ),
    "deepseek-v3": (
        r"\p{N}{1,3}",
        "[\u3040-\u30ff\u4e00-\u9fa5]+",
        r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
}
# Names that mean the same to llama.cpp.
_ALIASES = {
    "dbrx": "chatglm-bpe smaug-bpe",
    "deepseek-v3": "hunyuan-dense hy_v4 joyai-llm",
    "glm4": "glm5",
    "gpt-4o": "kanana2 llama4 minimax-m2 talkie",
    "llama-bpe": "falcon3 falcon-h1 jina-v5-nano lfm2 llama3 llama-v3 midm-2.0 pixtral",
    "olmo": "a.x-4.0 exaone4 gigachat gpt-2 granite-docling jais jina-de jina-es jina-v2-de "
    "jina-v2-es mellum modern-bert mpt phi-2 trillion",
    "qwen2": "bailingmoe bailingmoe2 deepseek-r1-qwen f2llmv2 grok-2 hunyuan kormo llada-moe "
    "megrez solar-open stablelm2",
    "smollm": "codeshell command-r exaone mellum2 minerva-7b refact starcoder",
    "tiny_aya": "cohere2moe",
}
OTHER_NAMES = {other: name for name, others in _ALIASES.items() for other in others.split()}
# Of these a text begins with BOS.
WITH_BOS = ("llama-bpe", "tekken")
# Of these a word that is a token is that token, whatever its merges.
WITH_WHOLE_WORDS = (*WITH_BOS, "glm4", "minicpm5", "youtu")
PRE_TOKENIZERS = ("olmo", "smollm", *WORD_PATTERNS)
