"""Texts go on from their prompts: with SentencePiece's tokenizers, whose decoders leave out the
space of a first token, a prompt and its text, joined, are the text of all tokens.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from nanoengine import LLM, SamplingParams
from nanoengine.sampling_params import BeamSearchParams

SPECIAL = ("<unk>", "<s>", "</s>", "<|im_end|>")
PIECES = ("▁", "a", "b", "c", "▁a", "▁b", "▁c")


def sentencepiece() -> Tokenizer:
    """In Llama 2's form: bytes, and a few words."""
    texts = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    texts[-len(PIECES) :] = PIECES
    vocab = {text: token_id for token_id, text in enumerate(texts)}
    merges = [("▁", letter) for letter in "abc"]
    backend = Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    backend.add_special_tokens(list(SPECIAL))
    return backend


@pytest.fixture(scope="module")
def folder(tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("sentencepiece") / "model"
    shutil.copytree(tiny("llama"), made, ignore=shutil.ignore_patterns("*token*", "chat*"))
    sentencepiece().save(str(made / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (made / "tokenizer_config.json").write_text(json.dumps(names))
    return made


@pytest.fixture(scope="module")
def theirs(folder: Path) -> PreTrainedTokenizerBase:
    made = AutoTokenizer.from_pretrained(folder)
    assert isinstance(made, PreTrainedTokenizerBase)
    return made


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, dtype="float32", kvcache_block_size=8, num_gpu_blocks=40) as engine:
        yield engine


def only(llm: LLM, token: str) -> SamplingParams:
    """Three times this token."""
    token_id = llm.tokenizer.backend.token_to_id(token)
    return SamplingParams(temperature=0, max_tokens=3, allowed_token_ids=[token_id])


@pytest.mark.parametrize("prompt", ["a b", "a ", "a", "é", "a</s>b"])
@pytest.mark.parametrize("token", ["▁c", "c", "▁", "<0xC3>"])
def test_prompt_and_text_are_the_text_of_all_tokens(
    llm: LLM, theirs: PreTrainedTokenizerBase, prompt: str, token: str
) -> None:
    """As the texts of vLLM and of transformers' pipeline are. Of bytes that are broken at their end
    transformers makes nothing but signs of replacement, the prompt's among them.
    """
    (output,) = llm.generate(prompt, only(llm, token), use_tqdm=False)
    ids = output.prompt_token_ids
    before = theirs.decode(ids, skip_special_tokens=True)
    whole = theirs.decode([*ids, *output["token_ids"]], skip_special_tokens=True)
    is_broken = not whole.startswith(before)
    assert is_broken == (prompt == "é" and token == "<0xC3>")
    assert output["text"] == ("\ufffd" * 3 if is_broken else whole[len(before) :])
    assert "".join(llm.stream(prompt, only(llm, token))) == output["text"]


def test_a_space_at_the_beginning_is_part_of_a_stop_string(llm: LLM) -> None:
    params = {"temperature": 0, "max_tokens": 3, "allowed_token_ids": [PIECE_C]}
    (output,) = llm.generate("a b", SamplingParams(**params, stop=" c"), use_tqdm=False)
    assert (output["text"], len(output["token_ids"])) == ("", 1)


def test_a_text_in_a_form_has_the_space_of_the_form(llm: LLM) -> None:
    params = SamplingParams(max_tokens=9, structured_outputs={"regex": " c{3}"})
    assert llm.generate("a b", params, use_tqdm=False)[0]["text"] == " ccc"


def test_beams_keep_the_space_too(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=128, max_tokens=1, ignore_eos=True)
    (output,) = llm.beam_search("a b", params, use_tqdm=False)
    decode = llm.tokenizer.decode
    for sequence in output.sequences:
        whole = decode([*output.prompt_token_ids, *sequence.token_ids])
        assert whole == decode(output.prompt_token_ids) + sequence.text
    assert any(sequence.text.startswith(" ") for sequence in output.sequences)


@pytest.mark.parametrize("end", ["<s>", "<|im_end|>"])
def test_after_a_special_token_a_text_begins_anew(llm: LLM, end: str) -> None:
    """An answer of a chat has no space that its template would write once more."""
    ids = [*llm.tokenizer.encode("a b"), llm.tokenizer.backend.token_to_id(end)]
    assert llm.generate(ids, only(llm, "▁c"), use_tqdm=False)[0]["text"] == "c c c"
    assert "".join(llm.stream(ids, only(llm, "▁c"))) == "c c c"


PIECE_C = sentencepiece().token_to_id("▁c")
