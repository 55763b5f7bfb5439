"""Makes a character tokenizer with a chat template: one token per ASCII character and one per turn marker. It is a
`Qwen2Tokenizer` over single bytes without merges, because `AutoTokenizer` requires this class for a Qwen2 model."""

from transformers import Qwen2Tokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

PAD, END = "<|pad|>", "<|end|>"
SYSTEM, USER, ASSISTANT = "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = (PAD, END, SYSTEM, USER, ASSISTANT)

# Typable characters come first, so that a small vocabulary has them; then the other bytes in their order.
_TEXT_BYTES = (*b"\n", *range(32, 127))
_BYTES = (*_TEXT_BYTES, *(byte for byte in range(256) if byte not in _TEXT_BYTES))
MIN_VOCAB_SIZE = len(SPECIAL_TOKENS) + len(_TEXT_BYTES)
FULL_VOCAB_SIZE = len(SPECIAL_TOKENS) + len(_BYTES)

# A turn is its role's token, the text, and the end token: three tokens besides a one-turn prompt's own text.
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + message['role'] + '; use system, user or assistant') }}"
    "{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def vocabulary(size: int) -> list[str]:
    """Returns tokens by id: special tokens, newline and printable ASCII, other bytes, then unused `<|reserved_i|>`.
    Bytes are spelt as in byte-level BPE (a space is `Ġ`). Raises ValueError below `MIN_VOCAB_SIZE`."""
    if size < MIN_VOCAB_SIZE:
        raise ValueError(
            f"`vocab_size` ({size}) must be at least {MIN_VOCAB_SIZE}: turn markers, newline and printable ASCII"
        )
    spelling = bytes_to_unicode()
    tokens = [*SPECIAL_TOKENS, *(spelling[byte] for byte in _BYTES)]
    reserved = [f"<|reserved_{index}|>" for index in range(size - len(tokens))]
    return [*tokens, *reserved][:size]


def make_tokenizer(vocab_size: int = FULL_VOCAB_SIZE, max_length: int = 4096) -> Qwen2Tokenizer:
    """Returns the tokenizer of `vocabulary(vocab_size)`; end of turn is end of sequence, padding has its own token.
    With `FULL_VOCAB_SIZE` or more every text survives a round trip; below, bytes without a token are dropped."""
    return Qwen2Tokenizer(
        vocab={token: index for index, token in enumerate(vocabulary(vocab_size))},
        merges=[],
        pad_token=PAD,
        eos_token=END,
        unk_token=None,
        additional_special_tokens=[SYSTEM, USER, ASSISTANT],
        clean_up_tokenization_spaces=False,  # else "2 ." loses its space on the way back
        model_max_length=max_length,
        chat_template=_CHAT_TEMPLATE,
    )
