"""Scores conversations with a Hugging Face sequence-classification model with one label. Neither the other
conversations in the batch nor padding change a score. Response text is adversarial: it cannot forge turns, and is never
truncated."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from dapo.config.reward import RewardModelConfig
from dapo.config.rules.reward import head_problems
from dapo.data.tokenizer import special_tokens, spelled_out
from dapo.types import Messages


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """A conversation to score. Made by `workers.reward_model`, consumed by `Classifier`. messages, prompt_text: of the
    `Prompt` with this id; prompt_text is used only if the tokenizer has no chat template. response: any text, including
    empty, NUL, lone surrogates and spelled-out special tokens."""

    prompt_id: int
    messages: Messages
    prompt_text: str
    response: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelScore:
    """The score of one conversation. Made by `Classifier`, consumed by `workers.reward_model`. value: the model's
    logit; NaN with a `failure`: "too_long", "empty" (no token), "not_finite", "memory" (does not fit on the GPU even
    alone), "template" (the chat template raised on this response) or "prompt" (it raises on this prompt with any
    response). detail: the error or the length, if any."""

    value: float
    failure: str = ""
    detail: str = ""


def no_score(failure: str, detail: str = "") -> ModelScore:
    """Returns NaN, never zero, which would be a valid score."""
    return ModelScore(value=math.nan, failure=failure, detail=detail)


def micro_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Returns indices in batches of at most `max_tokens` padded tokens, longest first, so that lengths in a batch are
    similar."""
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= max_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


class Classifier:
    def __init__(self, config: RewardModelConfig, path: str, device: str) -> None:
        """path: `config.path`, resolved. device: `cpu` or `cuda`. Raises ValueError if the model is not a sequence
        classifier with one label or its files lack weights, OSError if files are missing or unreadable."""
        disable_progress_bar()
        remote = config.trust_remote_code
        settings = AutoConfig.from_pretrained(path, trust_remote_code=remote)
        if problems := list(head_problems(path, settings.architectures or (), settings.num_labels)):
            raise ValueError("\n".join(problems))
        self._tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=remote)
        dtype = ("bfloat16" if device == "cuda" else "float32") if config.dtype == "auto" else config.dtype
        model, loaded = AutoModelForSequenceClassification.from_pretrained(
            path, config=settings, dtype=dtype, trust_remote_code=remote, use_safetensors=True, output_loading_info=True
        )
        if missing := sorted(loaded["missing_keys"]):
            raise ValueError(
                f"`reward.model.path` ({path}): its files hold no weights for {', '.join(missing[:4])}, which would be "
                "random; take a complete reward model"
            )
        self._device = torch.device(device)
        self._model = model.to(self._device)
        self._text_config = model.config.get_text_config()
        self._text_config.use_cache = False  # it would never be read
        self._vocabulary = model.get_input_embeddings().num_embeddings
        self._max_tokens = config.max_tokens
        window = getattr(self._text_config, "max_position_embeddings", None) or math.inf
        declared = min(window, self._tokenizer.model_max_length)
        self._max_length = min(config.max_length or declared, window, config.max_tokens)
        self._declared_pad = getattr(self._text_config, "pad_token_id", None)
        self._special = special_tokens(self._tokenizer)

    def score(self, conversations: Sequence[Conversation]) -> list[ModelScore]:
        found = [self._text(conversation) for conversation in conversations]
        scores = {index: text for index, text in enumerate(found) if isinstance(text, ModelScore)}
        texts = [text if isinstance(text, str) else "" for text in found]
        # A chat template writes all special tokens itself; without one the tokenizer must add them.
        ids = self._tokenizer(texts, add_special_tokens=not self._tokenizer.chat_template, verbose=False)["input_ids"]
        for index, tokens in enumerate(ids):
            if index not in scores and not 0 < len(tokens) <= self._max_length:
                scores[index] = no_score("too_long" if tokens else "empty", f"{len(tokens)} tokens")
        left = [index for index in range(len(ids)) if index not in scores]
        for batch in micro_batches([len(ids[index]) for index in left], self._max_tokens):
            chosen = [left[i] for i in batch]
            scores.update(zip(chosen, self._scores([ids[index] for index in chosen]), strict=True))
        return [scores[index] for index in range(len(conversations))]

    def _text(self, conversation: Conversation) -> str | ModelScore:
        response = spelled_out(self._special, _readable(conversation.response))
        if not self._tokenizer.chat_template:
            return _readable(conversation.prompt_text) + response
        try:
            return self._rendered(conversation.messages, response)
        except Exception as error:  # templates are third-party programs and may raise anything
            detail = f"{type(error).__name__}: {ascii(str(error)[:200])}"  # it may quote the response
        try:
            self._rendered(conversation.messages, "yes")
        except Exception:
            return no_score("prompt", detail)
        return no_score("template", detail)

    def _rendered(self, messages: Messages, response: str) -> str:
        turns = [{"role": role, "content": content} for role, content in (*messages, ("assistant", response))]
        return _readable(str(self._tokenizer.apply_chat_template(turns, tokenize=False)))

    def _scores(self, ids: list[list[int]]) -> list[ModelScore]:
        try:
            scores = self._forward(ids).tolist()
            return [ModelScore(value=score) if math.isfinite(score) else no_score("not_finite") for score in scores]
        except torch.OutOfMemoryError as error:
            detail = str(error)
        if len(ids) == 1:
            return [no_score("memory", detail)]
        torch.cuda.empty_cache()  # only here: in the handler above, the failed pass still holds its tensors
        half = len(ids) // 2
        return self._scores(ids[:half]) + self._scores(ids[half:])

    @torch.inference_mode()
    def _forward(self, ids: list[list[int]]) -> Tensor:
        """Returns logits [B], float32, for B token lists, right-padded."""
        pad = self._text_config.pad_token_id = self._pad(ids)
        width = max(map(len, ids))
        tokens = torch.tensor([row + [pad] * (width - len(row)) for row in ids], device=self._device)
        lengths = torch.tensor([[len(row)] for row in ids], device=self._device)
        mask = (torch.arange(width, device=self._device) < lengths).long()
        logits: Tensor = self._model(input_ids=tokens, attention_mask=mask).logits
        return logits.float().reshape(len(ids))

    def _pad(self, ids: list[list[int]]) -> int:
        """Returns the padding token. Decoder models read the score at the last token that is not padding. If the model
        declares no padding token, or one outside its embedding, the padding token must occur in no sequence: with a
        stop token as padding, the score of every response that ends with it would be read at the wrong position."""
        if self._declared_pad is not None and 0 <= self._declared_pad < self._vocabulary:
            return int(self._declared_pad)
        used = {token for row in ids for token in row}
        return next(token for token in range(self._vocabulary) if token not in used)


def _readable(text: str) -> str:
    """Replaces lone surrogates, which tokenizers reject, by U+FFFD."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
