"""Chooses who drafts: the model itself, its MTP head, an assistant, or a draft model."""

from __future__ import annotations

from nanoengine.devices.device import Device
from nanoengine.engine.assistant_drafter import AssistantDrafter
from nanoengine.engine.draft_vocabulary import DraftVocabulary, has_large_head
from nanoengine.engine.drafter import Drafter
from nanoengine.engine.mtp_drafter import MtpDrafter
from nanoengine.engine.sampler import Sampler
from nanoengine.startup.parts import Parts

AnyDrafter = Drafter | MtpDrafter | AssistantDrafter


def make_drafter(parts: Parts, sampler: Sampler, device: Device) -> AnyDrafter:
    """The drafter of an engine's parts. sampler: of its steps."""
    attention, decoder = parts.attention, parts.model.decoder
    own = Sampler(parts.ops, device.tensor)
    if (assistant := parts.model.assistant) is not None:
        vocabulary = DraftVocabulary(assistant.num_runs, device)
        return AssistantDrafter(assistant, attention, own, vocabulary, device)
    draft = parts.model.draft
    if draft is None and (head := decoder.mtp) is not None:  # one layer and the output head
        vocabulary = DraftVocabulary(head.num_runs, device)
        return MtpDrafter(head, attention, own, vocabulary, device)
    model, config = (decoder, parts.model.config) if draft is None else (draft, draft.config)
    num_runs = model.num_runs if has_large_head(config) else 0
    return Drafter(model, attention, sampler, DraftVocabulary(num_runs, device), device)
