"""What only Apertus and Arcee have: feed-forwards without a gate in each layer, Apertus' xIELU.

Logits and ids in fp32, on every tier and on ranks are tested with the other architectures' (TINY).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import reference, reference_greedy
from driver import GREEDY, Driver, small_engine
from marks import needs_compiler
from published import bytes_in_bf16, read_published
from step_bytes import step_bytes
from transformers import ApertusConfig, ArceeConfig
from transformers.activations import XIELUActivation
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from nanoengine.errors import UnsupportedModelError
from nanoengine.models import activations
from nanoengine.models.activations import Xielu
from nanoengine.models.rope import inverse_frequencies
from nanoengine.startup import parts


@pytest.mark.parametrize("draft", ["ngram:3", "resident:2"])
@pytest.mark.parametrize("name", ["apertus", "arcee"])
def test_guesses_change_no_token(tiny: Callable[[str], Path], name: str, draft: str) -> None:
    path, prompt = tiny(name), [*range(5, 15)] * 4
    output = Driver(small_engine(path, speculative=draft)).run([prompt])[0]
    tokens = output.outputs[0].token_ids
    assert tokens == reference_greedy(reference(path), prompt, GREEDY.max_tokens or 0, tokens)


@pytest.mark.parametrize("piece", [7, 1 << 20])
def test_xielu_is_transformers_own(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(activations, "PIECE", piece)
    theirs = XIELUActivation(1.3, 0.9, dtype=torch.float32)
    theirs.eps.fill_(-0.05)
    x = torch.cat((torch.randn(1000) * 3, torch.tensor([0.0, -0.0, -1e-7, 1e-7, -0.05, -80, 80])))
    xielu = Xielu.of(theirs.alpha_p, theirs.alpha_n, theirs.beta, theirs.eps)
    found = xielu(x[None].clone())[0]
    torch.testing.assert_close(found, theirs._xielu_python(x), rtol=1e-5, atol=1e-6)


def test_bits_of_a_number_do_not_depend_on_its_place() -> None:
    xielu, x = Xielu(1.1, 0.7, 0.5, -1e-6), torch.randn(999) * 2
    whole = xielu(x.clone()[None])[0]
    for start in range(0, 40):
        assert torch.equal(xielu(x[start:].clone()[None])[0], whole[start:])
        assert torch.equal(xielu(x[start : start + 1].clone()[None])[0], whole[start : start + 1])


# -- config.json

PUBLISHED: dict[str, Any] = {  # the form of swiss-ai/Apertus-8B-Instruct-2509
    "architectures": ["ApertusForCausalLM"],
    "attention_bias": False,
    "hidden_act": "xielu",
    "hidden_size": 4096,
    "intermediate_size": 21504,
    "max_position_embeddings": 65536,
    "mlp_bias": False,
    "model_type": "apertus",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "post_norm": False,
    "qk_norm": True,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
        "type": "llama3",
    },
    "rope_theta": 12000000,
    "tie_word_embeddings": False,
    "vocab_size": 131072,
}
OF_ARCEE: dict[str, Any] = {  # the form of arcee-ai/AFM-4.5B
    "architectures": ["ArceeForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "relu2",
    "hidden_size": 2560,
    "intermediate_size": 18432,
    "max_position_embeddings": 65536,
    "mlp_bias": False,
    "model_type": "arcee",
    "num_attention_heads": 20,
    "num_hidden_layers": 36,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 20.0,
        "mscale": 1.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "type": "yarn",
    },
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}


@pytest.mark.parametrize(
    ("published", "billions"), [(PUBLISHED, 8.05), (OF_ARCEE, 4.62)], ids=["apertus", "arcee"]
)
def test_the_published_shape_has_the_published_size(
    tmp_path: Path, published: dict[str, Any], billions: float
) -> None:
    config = read_published(tmp_path, published)
    found = bytes_in_bf16(config)
    assert round(found.held / 2e9, 2) == billions


@pytest.mark.parametrize("old", [True, False], ids=["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("published", [PUBLISHED, OF_ARCEE], ids=["apertus", "arcee"])
def test_rope_is_read_as_transformers_reads_it(
    tmp_path: Path, published: dict[str, Any], old: bool
) -> None:
    changes: dict[str, Any] = {}
    if not old:
        parameters = published["rope_scaling"] | {"rope_theta": published["rope_theta"]}
        changes = {"rope_parameters": parameters}
        changes |= {"rope_scaling": "left out", "rope_theta": "left out"}
    ours = read_published(tmp_path, published, **changes)
    config_class = ApertusConfig if published is PUBLISHED else ArceeConfig
    theirs = config_class.from_pretrained(tmp_path)
    frequencies, factor = ROPE_INIT_FUNCTIONS[theirs.rope_parameters["rope_type"]](theirs, "cpu")
    torch.testing.assert_close(inverse_frequencies(ours.rope, 128), frequencies)
    assert ours.rope.attention_factor == pytest.approx(factor)


def test_an_apertus_without_rope_has_that_of_transformers(tmp_path: Path) -> None:
    bare = read_published(tmp_path, PUBLISHED, rope_scaling="left out", rope_theta="left out")
    assert bare.rope == read_published(tmp_path, PUBLISHED).rope


@pytest.mark.parametrize(
    ("published", "changes"),
    [
        (PUBLISHED, {"hidden_act": "silu"}),
        (PUBLISHED, {"mlp_bias": True}),
        (PUBLISHED, {"qk_norm": False}),
        (PUBLISHED, {"post_norm": True}),
        (PUBLISHED, {"sliding_window": 128}),
        (OF_ARCEE, {"hidden_act": "gelu"}),
        (OF_ARCEE, {"rope_scaling": {"rope_type": "spiral"}}),
    ],
)
def test_other_arithmetic_is_refused(
    tmp_path: Path, published: dict[str, Any], changes: dict[str, Any]
) -> None:
    key = next(iter(changes))
    with pytest.raises(UnsupportedModelError, match="RoPE 'spiral'" if "rope" in key else key):
        read_published(tmp_path, published, **changes)


@needs_compiler
@pytest.mark.parametrize("in_c", [True, False], ids=["C", "PyTorch"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_a_step_takes_is_planned(
    in_c: bool, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside what the largest step holds, by counting."""
    small = {"hidden_size": 256, "intermediate_size": 1344, "num_hidden_layers": 2}
    read_published(tmp_path, PUBLISHED, **small, num_attention_heads=8, vocab_size=512)
    if not in_c:
        monkeypatch.setattr(parts, "find_kernels", lambda *_: (None, "not here"))
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 256, "dtype": dtype}
    estimated, measured = step_bytes(tmp_path, monkeypatch, load_format="dummy", **settings)
    assert measured <= estimated <= 1.8 * measured
