"""Names the metrics of where the draws went: by source, and by the curriculum.

In: nothing. Out: `DRAWS`, families for `names.py`.
"""

from dapo.report.metric import Family, Metric

SOURCE = Family(
    "source",
    "with `data.sources`: the same groups as `rollout/`, by source",
    "dapo/report/metrics.py",
    (
        Metric("{source}/drawn", "groups", "groups that the step used up"),
        Metric("{source}/share", "share", "of all groups that the step used up; over steps, its weight"),
        Metric("{source}/trained", "groups", "groups that were trained on"),
        Metric("{source}/mixed", "share", "of the groups used up: with accuracies that are not all equal"),
        Metric("{source}/accuracy", "share", "mean accuracy of the responses that could be scored"),
        Metric("{source}/reward_mean", "", "mean reward, penalties included"),
        Metric("{source}/response_length_mean", "tokens", "mean length"),
        Metric("{source}/tokens", "tokens", "response tokens of the groups used up"),
    ),
)

CURRICULUM = Family(
    "curriculum",
    "with `data.curriculum=retire` or `weighted`: the visits of the step's draws",
    "dapo/data/order.py",
    (
        Metric("skipped", "share", "of the visits that the draws came by: passed over"),
        Metric("retired", "share", "prompts that were not drawn at all"),
        Metric(
            "effective_prompts",
            "share",
            "1 / (prompts × Σ share²), with the effective share of each prompt in the draws: 1 where all are alike",
        ),
        Metric("visited", "share", "prompts that an earlier step had used a group of"),
    ),
)

DRAWS = (SOURCE, CURRICULUM)
