"""Maps a model's parameters to the tensors of its checkpoint files: transformers renames some tensors of the files and
stacks the experts of a layer in one parameter; reading, exports and engines need the names of the files."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

MAX_NAMES_SHOWN = 4


@dataclass(frozen=True, slots=True)
class Part:
    """A stored tensor: `parameter[expert, start : start + shape[0]]`, or all of it without `expert`."""

    name: str
    shape: tuple[int, ...]
    expert: int | None = None
    start: int = 0

    def of(self, parameter: Tensor) -> Tensor:
        """Returns this part of a full parameter, as a view."""
        return parameter if self.expert is None else parameter[self.expert, self.start : self.start + self.shape[0]]


def whole(name: str, shape: Sequence[int]) -> list[Part]:
    """Returns the only part of a parameter that the files store unchanged under its own name."""
    return [Part(name, tuple(shape))]


class FileNames:
    """Names of one model's parameters in its files: GPT-NeoX stores `lm_head.weight` as `embed_out.weight`; Qwen3-MoE
    stores `experts.gate_up_proj` [E, 2 I, H] as two tensors per expert. Raises ValueError for a model that computes a
    parameter from stored tensors in any other way."""

    def __init__(self, model: PreTrainedModel) -> None:
        mapping = get_model_conversion_mapping(model, add_legacy=False)
        self._back = [each.reverse_transform() for each in reversed(mapping) if isinstance(each, WeightRenaming)]
        self._stacks: dict[str, list[str]] = {}  # suffix of a parameter's name -> those of its tensors per expert
        names = [name for name, _ in model.named_parameters()]
        for converter in mapping:
            if not isinstance(converter, WeightConverter):
                continue
            made = [name for name in names if name.endswith(tuple(converter.target_patterns))]
            if made and not _stacks_experts(converter):
                raise ValueError(
                    f"`model.path`: {type(model).__name__} makes {', '.join(made[:MAX_NAMES_SHOWN])} of "
                    f"{', '.join(converter.source_patterns[:MAX_NAMES_SHOWN])} in the files, in a way that the actors "
                    "neither read nor write; choose another architecture"
                )
            if made:
                self._stacks[converter.target_patterns[0]] = converter.source_patterns

    def parts(self, name: str, shape: Sequence[int]) -> list[Part]:
        """Returns the stored tensors of a parameter, given its name in the model and its full shape."""
        for end, sources in self._stacks.items():
            if name.endswith(end):
                before, (experts, rows, *others) = name.removesuffix(end), shape
                rows //= len(sources)
                return [
                    Part(self._stored(before + source.replace("*", str(expert))), (rows, *others), expert, rows * place)
                    for expert in range(experts)
                    for place, source in enumerate(sources)
                ]
        return whole(self._stored(name), shape)

    def _stored(self, name: str) -> str:
        return rename_source_key(name, self._back, [], reverse=True)[0] if self._back else name


def _stacks_experts(converter: WeightConverter) -> bool:
    """Whether it stacks tensors of numbered experts, where an expert may have several, concatenated."""
    kinds = [(type(operation), getattr(operation, "dim", None)) for operation in converter.operations]
    numbered = all(source.count("*") == 1 for source in converter.source_patterns)
    one = len(converter.target_patterns) == 1
    return one and numbered and kinds in ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)])
