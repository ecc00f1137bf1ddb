"""OLMo 3 7B, stage 1, as the public reproduction on TPUs ran it: one cosine over the whole epoch.

Taken from it: a single cosine over 1,414,078 steps, which ends at 3e-5 (AI2's ended at 3.93e-5, and was 17 % lower halfway);
the repetition filter on (AI2 had it off); what is not public of the mix left out, 0.5 % of it: name those files in
`data.omitted_files`. All else is stage 1's.

Not taken from it, being faults: an order that depends on the number of hosts, data read twice after a restart, a first
update at rate 0, a rate that falls behind after skipped steps, a skip rule that sees the norm after clipping and a loss
with z-loss, a vocabulary without padding rows.
"""

from trainer.recipe import Recipe, RepetitionFilter, SchedulePiece
from trainer.recipes import olmo3_7b_stage1 as stage_1

STEPS = 1_414_078
SCHEDULE = (SchedulePiece(shape="cosine", peak=stage_1.PEAK, warmup_steps=2000, total_steps=STEPS, alpha_f=0.1),)
FILTER = RepetitionFilter(min_period=1, max_period=13, max_count=32)


def recipe() -> Recipe:
    """The recipe, not frozen yet."""
    data = stage_1.DATA.model_copy(update={"repetition_filter": FILTER})
    return stage_1.recipe().model_copy(
        update={"name": "olmo3_7b_stage1_one_cosine", "data": data, "schedule": SCHEDULE}
    )
