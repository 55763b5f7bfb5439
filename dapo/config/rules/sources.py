"""Checks of `data.train_files`, `data.sources` and their entries."""

from collections.abc import Iterator

from dapo.config.schema import Config

TRAIN = "train"
RESERVED = (TRAIN, "eval")  # names of splits in the sample store (`dapo.store.schema`)


def sources(cfg: Config) -> Iterator[str]:
    data = cfg.data
    if bool(data.train_files) == bool(data.sources):
        have = f"{data.train_files}), and so has `data.sources`" if data.sources else "[]), and `data.sources` is empty"
        yield (
            f"`data.train_files` ({have}; give at least one file or hub data set, as in data.train_files=[a.parquet], "
            "or data.sources=[{name: sums, files: [a.parquet]}] with data.train_files=[]"
        )
    named = list(data.val_files) if isinstance(data.val_files, dict) else []
    names = [("data.val_files", name) for name in named]
    names += [(f"data.sources[{index}].name", source.name) for index, source in enumerate(data.sources)]
    for key, name in names:
        if name in RESERVED:  # would be mixed up in the sample store
            what = "the training prompts" if name == TRAIN else "a held-out set without a name"
            yield f"`{key}` ({name}) is the name that `samples.sqlite` has for {what}; take another, such as my_{name}"
    for name in (source.name for source in data.sources if source.val_files and source.name in named):
        yield f"`data.val_files` has a set `{name}`, and so has `data.sources` with its `val_files`; rename one"
    if data.val_files and not isinstance(data.val_files, dict) and any(source.val_files for source in data.sources):
        yield (
            f"`data.val_files` ({data.val_files}) is a set without a name, next to `val_files` of `data.sources`; name "
            "it, as in data.val_files={all: a.parquet}"
        )
    for index, source in enumerate(data.sources):
        key = f"data.sources[{index}]"
        if source.name in [one.name for one in data.sources[:index]]:
            yield f"`{key}.name` ({source.name}) stands twice; metrics need a name for each"
        if source.max_response_length > data.max_response_length:
            yield (
                f"`{key}.max_response_length` ({source.max_response_length}) must be at most "
                f"`data.max_response_length` ({data.max_response_length}), which engines are made for; raise that one"
            )
        overlong = cfg.reward.overlong_buffer
        if overlong.enable and 0 < source.max_response_length <= overlong.len:
            yield (
                f"`{key}.max_response_length` ({source.max_response_length}) must be larger than "
                f"`reward.overlong_buffer.len` ({overlong.len}); lower the buffer, raise the cap, or switch it off "
                "(`reward.overlong_buffer.enable=false`)"
            )
