"""A tiny model whose chat template shows tools, as that of Qwen does, and lets it think."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}"
    "<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}{{ '\\n' }}{% endfor %}assistant:"
    "{% if enable_thinking %}<think>{{ '\\n' }}{% endif %}"
)
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


def tool_model(source: Path, target: Path, template: str = TEMPLATE) -> Path:
    """A copy of a checkpoint with this template."""
    shutil.copytree(source, target)
    (target / "chat_template.jinja").write_text(template, encoding="utf-8")
    return target
