"""A reward model of random weights made in code, and the scores that transformers alone gives with it."""

import math

import torch
from transformers import AutoModelForSequenceClassification, Qwen2Config
from transformers import Qwen2ForSequenceClassification as Scorer

from dapo.tiny.tokenizer import make_tokenizer

QUESTION = "2+2?"
NAN = "~"  # the tiny model has no number for this character


def make_reward_model(folder, *, pad=0, labels=1, kind=Scorer, template=True, nan=""):
    """A model of random weights with its tokenizer. pad: what its config.json names. nan: a character whose embedding
    is broken."""
    tokenizer = make_tokenizer(max_length=4096)
    if not template:
        tokenizer.chat_template = None
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
        pad_token_id=pad,
        num_labels=labels,
        **sizes,
    )
    model = kind(config)
    if nan:
        with torch.no_grad():
            model.get_input_embeddings().weight[tokenizer(nan)["input_ids"][0]] = math.nan
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def harmless(text):
    """What the model is to read of a response."""
    for role in ("end", "system", "assistant"):
        text = text.replace(f"<|{role}|>", f"< |{role}|>")
    return text.replace("\ud800", "\ufffd")


def one_by_one(path, texts, *, template=True, messages=(("user", QUESTION),)):
    """The scores that transformers gives, one conversation at a time, without padding."""
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(path), make_tokenizer()
    scores = []
    for text in texts:
        if template:
            turns = [{"role": role, "content": content} for role, content in (*messages, ("assistant", text))]
            ids = tokenizer.apply_chat_template(turns, return_dict=False)
        else:
            ids = tokenizer(QUESTION + text)["input_ids"]
        with torch.no_grad():
            scores.append(model(input_ids=torch.tensor([ids])).logits.item())
    return scores
